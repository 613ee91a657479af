"""Expert parallelism: experts over ranks, and their tokens to them."""
