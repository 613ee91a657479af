"""Built-in loggers."""
