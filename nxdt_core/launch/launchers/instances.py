"""EC2 instances with accelerators: devices, EFA interfaces, and what Kubernetes calls them.

From AWS's page of accelerated instances (November 2026). A process of a run uses one device: a GPU, or a logical
NeuronCore, of which trn2 and trn3 combine two physical ones by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["INSTANCES", "Instance"]

_CORES = "aws.amazon.com/neuroncore"
"""Resource of the Neuron device plugin; it counts cores."""
_GPUS = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One type of instance."""

    devices: int
    """Processes, one per device."""
    efa: int
    """EFA interfaces."""
    resource: str
    """Kubernetes' name of the devices."""
    resources: int
    """How many of these it has: Kubernetes counts physical cores."""


INSTANCES: Mapping[str, Instance] = {
    "trn1.2xlarge": Instance(devices=2, efa=0, resource=_CORES, resources=2),
    "trn1.32xlarge": Instance(devices=32, efa=8, resource=_CORES, resources=32),
    "trn1n.32xlarge": Instance(devices=32, efa=16, resource=_CORES, resources=32),
    "trn2.48xlarge": Instance(devices=64, efa=16, resource=_CORES, resources=128),
    "p4d.24xlarge": Instance(devices=8, efa=4, resource=_GPUS, resources=8),
    "p4de.24xlarge": Instance(devices=8, efa=4, resource=_GPUS, resources=8),
    "p5.48xlarge": Instance(devices=8, efa=32, resource=_GPUS, resources=8),
    "p5en.48xlarge": Instance(devices=8, efa=16, resource=_GPUS, resources=8),
}
"""By type without SageMaker's prefix ``ml.``."""
