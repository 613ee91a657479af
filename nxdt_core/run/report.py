"""Reports of a run: the banner before its first slow step, the differences on resume, the summary at its end; errors
of running out of memory, with what is in use and what was estimated.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.format.state_tree import compare_trees
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.schema import RunConfig
from nxdt_core.config.show import shown_words
from nxdt_core.distributed.devices import EXPANDABLE, DeviceProfile, meta_device, profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.ranks import OutOfMemory
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.run.log import human
from nxdt_core.train import build
from nxdt_core.train.session import TrainSession
from nxdt_core.train.weights.average import has_average
from nxdt_core.train.weights.saved_config import config_to_save

_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""Text in the message of the ``RuntimeError`` that torch raises where the host has no memory left."""
_ESTIMATE_S = 10.0
"""Longest wait of the other ranks for an estimate; it takes 4 CPU-seconds, most of them imports."""
_GIB = 2**30
_RESUME = "checkpoint.resume_if_exists"
_OF_THE_RESULT = ("model", "data", "precision", "objective", "adapter", "seed", "trainer.gradient_clip_val")
"""Sections and keys that decide what a run computes. (A layout does not.)"""
_NOTED_ELSEWHERE = ("model.optim.sched.max_steps", "data.num_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank, in the two parts that users can do something about in different ways."""

    held: int
    """Between steps: weights, gradients and optimizer state. Sharding helps."""
    step: int
    """During a step: activations, logits and buffers. Smaller micro-batches and recomputation help."""


@contextmanager
def memory_errors_explained(session: TrainSession) -> Iterator[None]:
    """Turn what allocators raise into an :class:`nxdt_core.errors.ranks.OutOfMemory` of this rank.

    Args:
        session: which the block builds or trains; the memory that its configuration takes is estimated again.

    Raises:
        OutOfMemory: the device, or the host, has no memory for what was asked.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _HOST_ALLOCATOR not in str(error):
            raise
        engine, part = session.engine, ""
        profile = profile_of(engine.device)
        peak = profile.operations.max_memory_bytes(engine.device)
        total = profile.operations.total_memory_bytes(engine.device)
        if peak is None or (total is None and not profile.host):
            usage = "the device does not say how much memory tensors had taken"
        elif total is None:
            usage = f"the process had taken up to {peak / _GIB:.1f} GiB"
        else:
            usage = f"tensors had taken up to {peak / _GIB:.1f} GiB of {total / _GIB:.1f} GiB"
            tensors: list[Any] = []
            if session.built_model is not None:
                for _, parameter in session.built_model.named_parameters():
                    tensors += [parameter, parameter.grad]
            if session.built_optimizer is not None:
                for state in session.built_optimizer.inner.state.values():
                    tensors += state.values()
            local = [local_of(tensor) for tensor in tensors]
            between_steps = sum(tensor.nbytes for tensor in local if isinstance(tensor, torch.Tensor))
            pp_rank = engine.rank_info.rank * engine.rank_info.mesh.get("pp", 1) // engine.rank_info.world_size
            in_step = max(0, peak - between_steps)
            part = compare(MemoryUse(held=between_steps, step=in_step), _estimated(session.config, pp_rank))
        raise OutOfMemory(
            rank=engine.ranks.rank, host=engine.ranks.host, device=str(engine.device), usage=usage, part=part
        ) from error


def _estimated(config: ResolvedConfig, pp_rank: int) -> MemoryUse | None:
    """Return what ``nxdt plan`` expects of this rank; None if it fails or takes too long.

    (It runs in a separate process: the estimate simulates a process group, and this process may be in a real one.)
    """
    command = [sys.executable, "-m", "nxdt_core", "plan", "--json", "--", config.source, *config.overrides]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ESTIMATE_S, check=False)
        ranks = json.loads(done.stdout)["ranks"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
    memory = next(rank["memory_bytes"] for rank in ranks if rank["pp_rank"] == pp_rank)
    between_steps = memory["weights"] + memory["gradients"] + memory["optimizer"]
    return MemoryUse(held=between_steps, step=memory["total"] - between_steps)


def compare(measured: MemoryUse, estimated: MemoryUse | None) -> str:
    """Return a sentence on what was taken for what, and which part is more than was expected; empty without an
    estimate."""
    if estimated is None:
        return ""
    parts = (
        ("weights, gradients and optimizer state", measured.held, estimated.held),
        ("activations and buffers", measured.step, estimated.step),
    )
    taken = " and ".join(f"{have / _GIB:.1f} GiB {name} (estimated: {want / _GIB:.1f})" for name, have, want in parts)
    name, have, want = max(parts, key=lambda part: part[1] - part[2])
    excess = (
        f"{name} exceeded the estimate" if have > want else "neither exceeded its estimate, the device is too small"
    )
    return f" Of that, {taken}: {excess}."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Result of :func:`nxdt_core.run.training`."""

    step: int
    max_steps: int
    loss: float | None
    """Loss of the last step; None where no step was trained."""
    consumed_tokens: int
    tokens_per_s: float | None
    """Median over the logged intervals; None where no step was trained."""
    run_dir: Path
    checkpoint: str | None
    """URI of the newest checkpoint."""
    resume_command: str | None
    """Command that resumes the run, or that starts the run itself after a trial; None without a checkpoint."""
    exit_status: int = 0
    """128 + the signal's number after a signal, as shells count."""

    def to_dict(self) -> dict[str, object]:
        """Return what ``nxdt train --json`` prints; keys are only ever added."""
        loss = self.loss if self.loss is not None and math.isfinite(self.loss) else None
        return {**asdict(self), "loss": loss, "run_dir": str(self.run_dir)}

    def __str__(self) -> str:
        rows = [("steps", f"{self.step} of {self.max_steps}")]
        if self.loss is not None:
            rows.append(("loss", f"{self.loss:.4f}"))
        rows.append(("tokens", f"{self.consumed_tokens:,}"))
        if self.tokens_per_s is not None:
            rows.append(("tokens/s", human(self.tokens_per_s)))
        rows += [
            ("run", str(self.run_dir)),
            ("checkpoint", self.checkpoint or "none"),
        ]
        if self.resume_command is not None:
            rows.append(("resume", self.resume_command))
        return "\n".join(f"{name + ':':<12}{value}" for name, value in rows)


def banner(config: ResolvedConfig, engine: ParallelEngine) -> Iterator[str]:
    """Yield the lines: model, devices and layout, precision, optimizer, data, steps, run directory, checkpoints."""
    run, data = config.run, config.run.data
    model = [config.selected("model").component.record.name]
    with suppress(NxdtError), meta_device():  # of a model that the run itself will refuse
        parameters = build.model_builder(config).build().parameters()  # without memory
        model.append(f"{human(sum(map(torch.Tensor.numel, parameters))).replace('G', 'B')} parameters")
    if config.components["adapter"] is not None:
        model.append(f"adapter {config.selected('adapter').component.record.name}")
    traits = build.objective(config).traits
    tokens = data.global_batch_size * traits.rows_per_sample * data.seq_length
    batch = traits.batch(data.global_batch_size, data.seq_length)
    sizes = run.distributed_strategy.mesh_sizes(engine.rank_info.world_size)
    named = {"TP": sizes.tp, "PP": sizes.pp, "CP": sizes.cp, "EP": sizes.ep, "DP": sizes.dp}
    layout = " x ".join([f"{name} {size}" for name, size in named.items() if size > 1]) or "one process"
    if sizes.zero_stage and sizes.fsdp > 1:
        layout += f", ZeRO {sizes.zero_stage}"
    last, optimizer, origin = run.trainer.max_steps, config.selected("optimizer"), config.origins["model.optim.lr"]
    default = f", the default of {origin.where}" if origin.kind == "plugin" else ""
    rows = {
        "model": ", ".join(model),
        "devices": f"{engine.rank_info.world_size} x {engine.device.type}, {layout}",
        "precision": config.selected("precision").component.record.name,
        "optimizer": f"{optimizer.component.record.name}, learning rate {optimizer.config.lr:g}{default}",
        "data": f"{config.selected('dataset').component.record.name}, {batch} = {tokens:,} tokens per step",
        "steps": f"{last:,}, {human(last * tokens)} tokens" if last > 0 else "until max_time",
        "run": str(config.run_dir),
        "checkpoints": config.checkpoint_uri if run.checkpoint.enabled else "none",
    }
    for name, value in rows.items():
        yield f"{name:<12}{value}"


def ignored_settings(run: RunConfig, profile: DeviceProfile) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect on the device."""
    trainer = run.trainer
    if run.data.pin_memory and not profile.pinned_host_memory:
        yield f"data.pin_memory has no effect: copies to {profile.device_type} do not gain from pinned memory"
    if trainer.float32_matmul_precision != "highest" and not profile.reduced_float32_matmul:
        yield (
            f"trainer.float32_matmul_precision={trainer.float32_matmul_precision} has no effect: {profile.device_type} "
            "has no shorter format for float32 matrix products"
        )
    wanted, names = trainer.expandable_segments, profile.allocator_variables
    if wanted and not names:
        yield f"trainer.expandable_segments has no effect: the allocator of {profile.device_type} has no such segments"
    elif names and wanted is not None and wanted != any(EXPANDABLE in os.environ.get(name, "") for name in names):
        named = next((name for name in names if name in os.environ), names[0])
        yield (
            f"trainer.expandable_segments={str(wanted).lower()} has no effect: {named} is set to "
            f"{os.environ.get(named, '')!r} and takes precedence"
        )


def resume_command(config: ResolvedConfig, step: int) -> str:
    """Return the command that resumes the run, with a later end if the run has reached its end; for a trial, the
    command of the run itself."""
    overrides = {word.partition("=")[0]: word for word in config.overrides}
    manager, trainer = config.run.exp_manager, config.run.trainer

    def override(key: str, value: object) -> None:
        overrides[key] = f"{key}={value}"

    if trainer.fast_dev_run:
        override("trainer.fast_dev_run", "false")
    else:
        if manager.use_datetime_version and manager.version is not None:
            override("exp_manager.version", manager.version)
        if not config.run.checkpoint.resume_if_exists:
            overrides.pop(_RESUME, None)  # it comes last
            override(_RESUME, "true")
        if step >= trainer.max_steps:
            passes, asked = config.run.trainer.max_epochs, config.tree.get("trainer.max_steps")
            if passes is not None and passes > 0 and isinstance(asked, int) and step < asked:
                override("trainer.max_epochs", 2 * passes)
            else:
                override("trainer.max_steps", 2 * step)
    return shlex.join(["nxdt", "train", config.source, *shown_words(config, overrides.values())])


def resume_notes(session: TrainSession, horizon: int) -> Iterator[str]:
    """Yield a line for each difference in schedule, settings, plugins and average.

    Args:
        session: resumed.
        horizon: last step of the schedule that the resumed run was trained with.
    """
    assert session.resumed is not None
    facts, now = session.resumed.facts, session.config.run.model.optim.sched.max_steps
    if horizon != now:
        yield f"the learning-rate schedule now ends at step {now} instead of {horizon}"
    for changed in compare_trees("config", facts.config, config_to_save(session.config)):
        counts = any(f"{changed.path}.".startswith(f"{path}.") for path in _OF_THE_RESULT)
        if counts and changed.only_in is None and changed.path not in _NOTED_ELSEWHERE:
            yield f"{changed.path} is now {changed.values[1]}; the checkpoint was trained with {changed.values[0]}"
    before, after = facts.plugins, session.config.kernel.identities()
    differ = sorted(name for name in before.keys() | after.keys() if before and before.get(name) != after.get(name))
    if differ:  # none where the checkpoint names no plugin
        changes = []
        for name in differ:
            change = "new" if name not in before else "not installed"
            if name in before and name in after:
                old, new = (plugins[name].partition(" ")[2].partition(" ")[0] for plugins in (before, after))
                change = "other code" if old == new else f"{new} instead of {old}"
            changes.append(f"{name} ({change})")
        yield f"plugins that differ from those of the checkpoint: {', '.join(changes)}"
    averages = session.average is not None
    if averages != has_average(session.resumed):
        news = "begins in this run" if averages else "ends here, since exp_manager.ema.enable is false"
        yield f"the average of the weights {news}"
