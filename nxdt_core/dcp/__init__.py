"""Reading and writing checkpoints through ``torch.distributed.checkpoint``."""

from nxdt_core.dcp.read import NxdtReader
from nxdt_core.dcp.write import NxdtWriter

__all__ = ["NxdtReader", "NxdtWriter"]
