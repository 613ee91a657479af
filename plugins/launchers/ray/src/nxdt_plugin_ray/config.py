"""Options of ``nxdt launch ray``, which are keys of a cluster file as well. Neither torch nor Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from nxdt_core.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class RayOptions(Section):
    """A cluster of Ray."""

    nodes: PositiveInt | None = None
    """Nodes of the run; `--nodes` and `trainer.num_nodes` say the same."""
    devices_per_node: PositiveInt | None = None
    """Devices per node; compared with trainer.devices before anything is written."""
    address: str = "auto"
    """Address of the cluster, as ray.init takes it; auto is the cluster of this machine, local starts one."""
    cpus_per_node: NonNegativeFloat = 1
    """CPUs that a node reserves."""
    gpus_per_node: NonNegativeFloat = 0
    """GPUs that a node reserves."""
    resources: Mapping[str, float] = Field(default_factory=dict)
    """Further resources that a node reserves, such as neuron_cores=32."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """Placement of the run's nodes on those of the cluster, in Ray's terms; STRICT_SPREAD gives each another one."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Variables for all processes."""
    compile: bool | None = None
    """Compile the graphs first; by default where the engine is XLA's or model.compile is true."""
    max_restarts: NonNegativeInt = 3
    """Number of restarts after a loss, each from the newest checkpoint."""
