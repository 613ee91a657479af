"""Weights outside the training step: averages, export, import, frozen and reference weights."""
