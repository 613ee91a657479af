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
    """Time limit. Nothing is started that could exceed the time of a call."""
    default: bool = True
    """Whether it is part of the day when no stages are named."""
    options: Mapping[str, object] = field(default_factory=dict)


def _stage(name: str, group: str, work: str, minutes: float, *, default: bool = True, **options: object) -> Stage:
    return Stage(
        name=name,
        group=group,
        work=f"accelerator.measurements.{work}",
        minutes=minutes,
        default=default,
        options=options,
    )


STAGES: Sequence[Stage] = (
    _stage("machine", "machine", "machine:describe", 0.75),
    _stage("tests", "correctness", "correctness:tests", 1.5),
    _stage("runs", "correctness", "correctness:runs", 2),
    _stage("micro", "micro", "micro:kernels", 1.5),
    _stage("train-1b", "train", "train:pretrain", 2.5, shape="1b"),
    _stage("peers-1b", "train", "peers:pretrain", 2.5, shape="1b"),
    _stage("train-8b", "train", "train:pretrain", 3, shape="8b"),
    _stage("train-3b", "train", "train:pretrain", 2.5, shape="3b"),
    _stage("sft-4k", "finetune", "finetune:packed_chats", 2, sequence=4096),
    _stage("lora-8b", "finetune", "finetune:lora", 2.5),
    _stage("traces", "traces", "traces:three_steps", 1.25),
    _stage("checkpoint", "checkpoint", "saves:background_save", 2),
    _stage("generate", "generate", "generation:tokens_per_second", 1.5, default=False),
    _stage("mixtral", "finetune", "finetune:mixtral", 3, default=False),
    _stage("peers-8b", "train", "peers:pretrain", 3, default=False, shape="8b"),
    _stage("sft-8k", "finetune", "finetune:packed_chats", 2, default=False, sequence=8192),
    _stage("peers-3b", "train", "peers:pretrain", 2.5, default=False, shape="3b"),
    _stage("float8", "finetune", "finetune:float8", 2, default=False),
)
"""The limits of the default stages add up to 24 minutes, those of all to less than 40."""


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
