"""One training step on this rank: the global batch, the pipeline's schedules, gradients and the optimizer."""
