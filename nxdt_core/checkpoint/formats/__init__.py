"""Checkpoints of other programs, read through the kind ``checkpoint_format``."""
