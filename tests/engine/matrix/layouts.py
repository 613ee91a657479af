"""The layouts of the matrix, as data: sizes and options, and the keys of a configuration that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Numbers = Literal["float64", "fp32"]
"""``float64`` trains with AdamW, ``fp32`` with plain gradient descent, whose weights can be compared."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the matrix."""

    dp: int = 1
    """Data parallel ranks, ``replicas`` included."""
    replicas: int = 1
    zero: Literal[0, 1, 2, 3] = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    zbv: bool = False
    cp: int = 1
    cp_method: Literal["ring", "gather"] | None = None
    ep: int = 1
    shuffle: int = 1
    """Data parallel ranks that exchange tokens before experts."""
    moe: bool = False
    """Train the model with experts."""
    recompute: str | None = None
    """``full``, or a name of the plan's for selective recomputation."""
    tied: bool = False
    packed: bool = False
    global_batch: int | None = None
    """Micro-batches, where the batch is that of another layout."""

    @property
    def micro_batches(self) -> int:
        """Of the global batch: at least two for each data parallel rank and for each stage."""
        return self.global_batch or (8 if self.dp > 1 or self.pp > 2 else 4)

    @property
    def least_layers(self) -> int:
        """Layers that give several to each pipeline rank; two without a pipeline."""
        return 4 if self.pp > 1 else 2

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * (2 if self.zbv else self.vpp)

    @property
    def fsdp(self) -> int:
        """Ranks that share optimizer state."""
        return self.dp // self.replicas * self.cp

    @property
    def needs_newer_torch(self) -> bool:
        """Whether torch 2.9 cannot run it: its zero bubble, and heads of which two ranks have copies."""
        return self.zbv or self.tp > 2

    @property
    def name(self) -> str:
        schedule = "-zbv" if self.zbv else f"-vpp{self.vpp}" if self.vpp > 1 else ""
        parts = [
            f"dp{self.dp}-zero{self.zero}" * (self.dp > 1),
            f"replicas{self.replicas}" * (self.replicas > 1),
            f"ep{self.ep}" * (self.ep > 1),
            f"shuffle{self.shuffle}" * (self.shuffle > 1),
            f"cp{self.cp}-{self.cp_method or 'default'}" * (self.cp > 1),
            f"tp{self.tp}" * (self.tp > 1) + "-sp" * self.sp,
            f"pp{self.pp}{schedule}" * (self.pp > 1),
            f"recompute-{self.recompute}" * (self.recompute is not None),
            "tied" * self.tied,
            "moe" * self.moe,
            "packed" * self.packed,
        ]
        return ".".join(part for part in parts if part) or "one"

    @property
    def one_process(self) -> Layout:
        """The reference: the same model and data."""
        return Layout(moe=self.moe, tied=self.tied, packed=self.packed, global_batch=self.micro_batches)

    def overrides(self) -> list[str]:
        """Keys of the configuration that differ from one process."""
        strategy = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "token_shuffle_group_size": self.shuffle,
            "dp_replicate": self.replicas,
            "sequence_parallel": str(self.sp).lower(),
            "zero1": str(self.zero > 0).lower(),
        }
        if self.zero > 1:
            strategy["zero_stage"] = self.zero
        if self.zbv:
            strategy["pipeline_schedule"] = "zbv"
        if self.cp_method:
            strategy["context_parallel_method"] = self.cp_method
        keys = [f"distributed_strategy.{key}={value}" for key, value in strategy.items()]
        if self.recompute == "full":
            keys.append("model.activations_checkpoint_granularity=full")
        elif self.recompute:
            keys.append("model.activations_checkpoint_granularity=selective")
            keys.append(f"model.activations_checkpoint_recompute=[{self.recompute}]")
        return [f"trainer.devices={self.world}", *keys]


DP2, TP2, PP2 = Layout(dp=2), Layout(tp=2), Layout(pp=2)

_SINGLE = (
    *(Layout(dp=2, zero=zero) for zero in (0, 1, 2, 3)),
    Layout(dp=4, zero=3),
    TP2,
    Layout(tp=2, sp=True),
    Layout(tp=2, sp=True, packed=True),
    Layout(tp=4),  # two key and value heads: each on two ranks
    Layout(tp=4, sp=True),
    PP2,
    Layout(pp=2, packed=True),
    Layout(pp=4),
    Layout(pp=2, vpp=2),
    Layout(pp=2, zbv=True),
    Layout(cp=2, cp_method="ring"),
    Layout(cp=2, cp_method="gather"),
    Layout(cp=2, cp_method="ring", packed=True),
    Layout(cp=2, cp_method="gather", packed=True),
    Layout(cp=4, cp_method="ring"),
    Layout(dp=2, zero=2, moe=True),
    Layout(tp=2, sp=True, moe=True),
    Layout(cp=2, cp_method="gather", moe=True),
    Layout(dp=2, ep=2, moe=True),
    Layout(dp=4, ep=2, moe=True),
)

_PAIRS = (
    Layout(dp=4, replicas=2),
    Layout(dp=4, replicas=2, zero=3),
    Layout(dp=2, tp=2),
    Layout(dp=2, tp=2, zero=0),
    Layout(dp=2, tp=2, sp=True, zero=2),
    Layout(dp=2, tp=2, sp=True, zero=3),
    Layout(dp=2, pp=2),
    Layout(dp=2, pp=2, zero=3),
    Layout(dp=2, pp=2, vpp=2),
    Layout(dp=2, pp=2, vpp=2, zero=2),
    Layout(dp=2, pp=2, zbv=True),
    Layout(dp=2, cp=2, cp_method="ring"),
    Layout(dp=2, cp=2, cp_method="gather", zero=3, packed=True),
    Layout(tp=2, pp=2),
    Layout(tp=2, sp=True, pp=2, vpp=2),
    Layout(tp=2, sp=True, pp=2, zbv=True),
    Layout(tp=2, cp=2, cp_method="ring"),
    Layout(tp=2, sp=True, cp=2, cp_method="gather", packed=True),
    Layout(pp=2, cp=2, cp_method="ring"),
    Layout(pp=2, vpp=2, cp=2, cp_method="gather", packed=True),
    Layout(dp=2, ep=2, zero=3, moe=True),
    Layout(dp=2, ep=2, tp=2, moe=True),
    Layout(dp=2, ep=2, tp=2, sp=True, moe=True),
    Layout(dp=2, ep=2, pp=2, moe=True),
    Layout(cp=2, ep=2, cp_method="ring", moe=True),
    Layout(dp=2, ep=2, cp=2, cp_method="gather", moe=True),
)

_MANY = (
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=2, tp=2, sp=True, pp=2, zero=3, packed=True),
    Layout(dp=2, tp=2, sp=True, pp=2, vpp=2, zero=2),
    Layout(dp=2, tp=2, pp=2, zbv=True),
    Layout(dp=4, ep=2, tp=2, moe=True),
    Layout(dp=4, ep=2, tp=2, sp=True, zero=3, moe=True),
    Layout(dp=4, replicas=2, tp=2),
    Layout(dp=2, tp=2, cp=2, cp_method="ring"),
)

_TIED = (
    Layout(tp=2, sp=True),
    Layout(dp=2, zero=3),
    PP2,
    Layout(pp=2, tp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, zero=3),
    Layout(pp=2, vpp=2),
    Layout(pp=2, zbv=True),
    Layout(pp=2, zbv=True, dp=2, tp=2, zero=3),
)

_RECOMPUTE = (
    Layout(recompute="full"),
    Layout(dp=2, zero=3, recompute="full"),
    Layout(tp=2, sp=True, recompute="full"),
    Layout(tp=2, sp=True, recompute="CoreAttention"),
    Layout(pp=2, vpp=2, recompute="full"),
    Layout(cp=2, cp_method="ring", recompute="CoreAttention"),
    Layout(dp=2, tp=2, pp=2, zero=3, recompute="LlamaMLP"),
)

LAYOUTS: tuple[Layout, ...] = (
    *_SINGLE,
    *_PAIRS,
    *_MANY,
    *(replace(layout, tied=True) for layout in _TIED),
    *_RECOMPUTE,
)
