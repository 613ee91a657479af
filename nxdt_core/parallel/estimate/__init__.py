"""What a run would need, measured on the meta device under a fake process group: ``nxdt plan``."""

from nxdt_core.parallel.estimate.memory import Memory
from nxdt_core.parallel.estimate.run import Estimate, RankEstimate, estimate
from nxdt_core.parallel.estimate.weights import needs_stand_ins, optimizer_bytes_per_element
from nxdt_core.parallel.estimate.workload import Workload

__all__ = [
    "Estimate",
    "Memory",
    "RankEstimate",
    "Workload",
    "estimate",
    "needs_stand_ins",
    "optimizer_bytes_per_element",
]
