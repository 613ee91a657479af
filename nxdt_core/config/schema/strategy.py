"""Section ``distributed_strategy``: the layout over devices. The docstrings are the YAML reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxdt_core.config.annotations import PositiveInt
from nxdt_core.errors.launch import WorldDoesNotDivide
from nxdt_core.protocols.mesh import MeshSizes

__all__ = ["DistributedStrategyConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedStrategyConfig:
    """Sizes of the dimensions; what is left of the world is data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Devices that share the stack of layers (PP)."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = 1
    """Chunks of layers on each pipeline device (VPP); ``null`` means 1."""
    context_parallel_size: PositiveInt = 1
    """Devices that share each sequence (CP)."""
    context_parallel_method: Literal["ring", "gather"] | None = None
    """How they see each other's keys and values: ``ring`` passes them round, so that none holds a whole sequence of
    them; ``gather`` collects them in every layer. ``null`` takes what suits the device."""
    expert_model_parallel_size: PositiveInt = 1
    """Devices that share the experts (EP), borrowed from data and context parallelism."""
    dp_replicate: PositiveInt = 1
    """Groups of data parallel devices that each shard among themselves (hybrid sharding); a divisor of DP."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel layers along the sequence; has no effect with TP 1."""
    async_tensor_parallel: bool = False
    """Split the collectives of tensor parallel layers and their matrix products into parts, so that one part travels
    while another one is computed; needs ``sequence_parallel``, ``model.compile`` and a device with symmetric memory."""
    sequence_parallel_regather: bool = False
    """With ``sequence_parallel``: keep the rank's part of each tensor block's input for backward, and gather it again
    there. Needs 1/TP of the memory of those inputs, and sends them once more."""
    zero1: bool = True
    """Shard optimizer state and master weights over data parallel ranks."""
    zero_stage: Literal[1, 2, 3] | None = None
    """1 shards optimizer state, 2 gradients too, 3 weights too; ``null`` follows ``zero1``."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zbv"] | None = None
    """Order of micro-batches in the pipeline; ``null`` takes ``interleaved`` with VPP above 1, else ``1f1b``."""
    kv_replicator: PositiveInt = 1
    """Copies of each key and value head, where TP exceeds their number; 1 makes as many as are needed."""
    pad_heads: bool = False
    """Add heads that stay zero, where TP does not divide the query heads; otherwise such a TP is refused."""
    timeout_s: PositiveInt = 1800
    """Seconds without progress after which a run of several ranks counts as hung: a rank sends no heartbeats, or no
    rank computes, compiles, reads or writes. The run then ends, names the rank and writes all stacks. A rank that
    computes while the others wait for it in a collective may take three times as long."""
    token_shuffle_group_size: PositiveInt = 1
    """Neighbouring data parallel ranks that mix their tokens before experts and sort them out behind, while training;
    where experts have a bounded capacity, a rank with very similar tokens then drops fewer. A divisor of the ranks
    that shard parameters (DP / ``dp_replicate``)."""

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """Return the size of every dimension for so many processes.

        Raises:
            WorldDoesNotDivide: they do not fill whole copies of the model.
        """
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp, ep, replicas = self.context_parallel_size, self.expert_model_parallel_size, self.dp_replicate
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or not dp or dp % replicas or (dp // replicas * cp) % ep:
            raise WorldDoesNotDivide(world_size=world_size, tp=tp, pp=pp, cp=cp, dp_replicate=replicas, ep=ep)
        vpp, schedule = self.virtual_pipeline_model_parallel_size or 1, self.pipeline_schedule
        if pp == 1:
            vpp, schedule = 1, "1f1b"
        return MeshSizes(
            pp=pp,
            dp_replicate=replicas,
            dp_shard=dp // replicas,
            cp=cp,
            tp=tp,
            ep=ep,
            schedule=schedule or ("interleaved" if vpp > 1 else "1f1b"),
            vpp=2 if schedule == "zbv" else vpp,
            zero_stage=self.zero_stage if self.zero_stage is not None else (1 if self.zero1 else 0),
        )
