"""The stages in the order of their value, with their time limits. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["STAGES", "Stage", "chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One measurement, which runs in a separate process."""

    name: str
    group: str
    work: str
    """``module:function``; it is called with a :class:`accelerator.bench.Bench` and the options."""
    minutes: float
    """Time limit. Nothing is started that could exceed the time of a call. A stage that takes longer is stopped after
    twice its limit, or at the end of the call."""
    default: bool = True
    """Whether it is part of the day when no stages are named."""
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    imports: tuple[str, ...] = ()
    """Modules that its process imports while another stage measures; they must not use the device."""


def _stage(name: str, group: str, work: str, minutes: float, *, default: bool = True, **options: object) -> Stage:
    return Stage(
        name=name,
        group=group,
        work=f"accelerator.measurements.{work}",
        minutes=minutes,
        default=default,
        options=options,
        imports={"machine": (), "peers": (*_OWN, *_PEERS)}.get(group, _OWN),
    )


_OWN = ("nxdt_testing.processes.preload", "torch._dynamo")
_PEERS = ("torchtitan.models.llama3", "litgpt.model", "transformers.models.llama.modeling_llama")
_FLOAT8 = {"type": "float8", "scaling": "tensorwise"}
_ROWWISE = {"type": "float8", "scaling": "rowwise"}
_HALF_8B = {"shape": "8b", "layers": 16}
"""The float32 masters of all 32 layers do not fit."""

STAGES: Sequence[Stage] = (
    _stage("machine", "machine", "machine:describe", 0.25),
    _stage("train-8b", "train", "train:pretrain", 1.25, shape="8b"),
    _stage("qlora-8b", "finetune", "finetune:qlora", 0.5),
    _stage(
        "float8-8b", "float8", "train:pretrain", 1.25, precisions=[_FLOAT8, {"type": "mixed_precision"}], **_HALF_8B
    ),
    _stage("train-1b", "train", "train:pretrain", 0.5, shape="1b"),
    _stage("float8-1b", "float8", "train:pretrain", 0.75, precisions=[{**_FLOAT8, "rest": "autocast"}], shape="1b"),
    _stage("checks", "correctness", "correctness:checks", 1.5),
    _stage("command-8b", "train", "train:command", 0.5, shape="8b"),
    _stage("lora-8b", "finetune", "finetune:lora", 1.25),
    _stage("mixtral", "finetune", "finetune:mixtral", 0.75),
    _stage("chats", "finetune", "finetune:packed_chats", 0.5),
    _stage("grpo-1b", "finetune", "finetune:grpo", 0.75, default=False),
    _stage("generate", "generate", "generation:tokens_per_second", 1.5),
    _stage("checkpoint", "checkpoint", "saves:background_save", 0.75),
    _stage("micro", "micro", "micro:kernels", 0.5),
    _stage("peers-8b", "peers", "peers:pretrain", 0.75, default=False, shape="8b", names=["torchtitan", "litgpt"]),
    _stage("train-3b", "train", "train:pretrain", 0.5, default=False, shape="3b"),
    _stage("peers-3b", "peers", "peers:pretrain", 0.75, default=False, shape="3b"),
    _stage("peers-1b", "peers", "peers:pretrain", 0.75, default=False, shape="1b"),
    _stage("rowwise-8b", "float8", "train:pretrain", 0.75, default=False, precisions=[_ROWWISE], **_HALF_8B),
    _stage("runs", "correctness", "correctness:runs", 0.75, default=False),
    _stage("ranks", "ranks", "ranks:layouts", 3, default=False),
    _stage("several-8b", "ranks", "train:several", 4, default=False, shape="8b"),
)
"""What is least known comes first. The limits of the default stages add up to 12 minutes, those of all to 24."""


def chosen(names: Sequence[str], *, everything: bool = False) -> list[Stage]:
    """Return the stages that ``names`` (of stages or groups) select, in the table's order.

    Args:
        names: empty selects the default stages.
        everything: select all of them.

    Raises:
        KeyError: a name is neither a stage nor a group.
    """
    known = {stage.name for stage in STAGES} | {stage.group for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"unknown stage {unknown[0]!r}. Known: {', '.join(stage.name for stage in STAGES)}")
    if everything:
        return list(STAGES)
    if not names:
        return [stage for stage in STAGES if stage.default]
    return [stage for stage in STAGES if stage.name in names or stage.group in names]
