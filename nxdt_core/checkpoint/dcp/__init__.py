"""Reading and writing checkpoints through ``torch.distributed.checkpoint``."""
