"""Tensor and sequence parallelism: layers, heads and the vocabulary, cut over ranks."""
