"""What rules about the layout derive from the checked values: processes, sizes of the mesh, micro-batches."""

from __future__ import annotations

from dataclasses import fields

from nxdt_core.config.schema.strategy import DistributedStrategyConfig
from nxdt_core.errors.launch import WorldDoesNotDivide
from nxdt_core.protocols.engine import Settings
from nxdt_core.protocols.mesh import MeshSizes

__all__ = ["BATCH", "CP", "EP", "MICRO_BATCH", "PP", "REPLICAS", "TP", "VPP", "WORLD", "mesh_sizes", "micro_batches"]

_SECTION = "distributed_strategy"
TP = f"{_SECTION}.tensor_model_parallel_size"
PP = f"{_SECTION}.pipeline_model_parallel_size"
VPP = f"{_SECTION}.virtual_pipeline_model_parallel_size"
CP = f"{_SECTION}.context_parallel_size"
EP = f"{_SECTION}.expert_model_parallel_size"
REPLICAS = f"{_SECTION}.dp_replicate"
WORLD = ("trainer.devices", "trainer.num_nodes")
BATCH, MICRO_BATCH = "data.global_batch_size", "data.micro_batch_size"


def mesh_sizes(settings: Settings) -> MeshSizes | None:
    """Return the size of every dimension; None where they do not fit the processes or one is wrong."""
    world = settings.numbers(*WORLD)
    names = [field.name for field in fields(DistributedStrategyConfig)]
    if world is None or any(f"{_SECTION}.{name}" not in settings.values for name in names):
        return None
    strategy = DistributedStrategyConfig(**{name: settings.values[f"{_SECTION}.{name}"] for name in names})
    try:
        return strategy.mesh_sizes(world[0] * world[1])
    except WorldDoesNotDivide:
        return None


def micro_batches(settings: Settings) -> int | None:
    """Return the micro-batches of one step on each data parallel rank; None where the batch does not divide."""
    batch, sizes = settings.numbers(BATCH, MICRO_BATCH), mesh_sizes(settings)
    if batch is None or sizes is None:
        return None
    count, rest = divmod(batch[0], batch[1] * sizes.dp)
    return None if rest else count
