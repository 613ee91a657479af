"""One run from its configuration to its end: start, directory, log, metrics, summary."""
