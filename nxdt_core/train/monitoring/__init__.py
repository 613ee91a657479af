"""The state of a run for other programs: a health file, metrics for Prometheus, a port that serves both."""
