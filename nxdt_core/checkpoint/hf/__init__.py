"""Hugging Face directories: weights, key map and settings, read and written."""
