"""Context parallelism: one sequence over several ranks, and its attention."""
