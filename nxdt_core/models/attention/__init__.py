"""Attention and its masks, for plain and for packed batches."""
