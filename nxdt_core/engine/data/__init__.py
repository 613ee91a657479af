"""Data parallelism: FSDP2 over a stage's layers, gathers of weights, sums of gradients, and masters without FSDP2."""
