"""Losses of the torch engine: compiled, in chunks, and as log-probabilities."""
