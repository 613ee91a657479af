"""Checkpoints of other programs, read through the kind ``format``."""
