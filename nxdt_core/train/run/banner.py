"""What a run is, in the lines that it prints before its first slow step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.train import build
from nxdt_core.train.callbacks.console import human

__all__ = ["banner"]

_WIDTH = 12


def banner(config: ResolvedConfig, engine: ParallelEngine) -> Iterator[str]:
    """Yield the lines: model, devices and layout, precision, data, steps, run directory, checkpoints."""
    for name, value in _facts(config, engine):
        yield f"{name:<{_WIDTH}}{value}"


def _facts(config: ResolvedConfig, engine: ParallelEngine) -> Iterator[tuple[str, str]]:
    run, data = config.run, config.run.data
    model = [config.selected("model").component.record.name, *_parameters(config)]
    if config.components["adapter"] is not None:
        model.append(f"adapter {config.selected('adapter').component.record.name}")
    yield "model", ", ".join(model)
    yield "devices", f"{engine.rank_info.world_size} x {engine.device.type}, {_layout(config, engine)}"
    yield "precision", config.selected("precision").component.record.name
    tokens = data.global_batch_size * data.seq_length
    yield (
        "data",
        f"{config.selected('dataset').component.record.name}, {data.global_batch_size:,} sequences of"
        f" {data.seq_length:,} = {tokens:,} tokens per step",
    )
    last = run.trainer.max_steps
    yield "steps", f"{last:,}, {human(last * tokens)} tokens" if last > 0 else "until max_time"
    yield "run", str(config.run_dir)
    yield "checkpoints", config.checkpoint_uri if run.checkpoint.enabled else "none"


def _parameters(config: ResolvedConfig) -> Iterator[str]:
    """The number of parameters, counted without memory; nothing for a model that the run itself will refuse."""
    try:
        with torch.device("meta"):
            module = build.model_builder(config).build()
    except NxdtError:
        return
    count = human(sum(parameter.numel() for parameter in module.parameters()))
    yield f"{count.replace('G', 'B')} parameters"


def _layout(config: ResolvedConfig, engine: ParallelEngine) -> str:
    sizes = config.run.distributed_strategy.mesh_sizes(engine.rank_info.world_size)
    named = {"TP": sizes.tp, "PP": sizes.pp, "CP": sizes.cp, "EP": sizes.ep, "DP": sizes.dp}
    parts = [f"{name} {size}" for name, size in named.items() if size > 1]
    zero = [f"ZeRO {sizes.zero_stage}"] if sizes.zero_stage and sizes.fsdp > 1 else []
    return " x ".join(parts) + "".join(f", {each}" for each in zero) if parts else "one process"
