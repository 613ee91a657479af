"""Layouts: device profiles and the engine on stock ``torch.distributed``."""
