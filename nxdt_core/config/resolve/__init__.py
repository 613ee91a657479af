"""From the values that were written to a complete, typed configuration."""
