"""Runs that stages measure: a configuration file, then what ``nxdt train`` calls, then the run's own metrics."""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerator.bench import GIB, Bench

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["SHAPES", "Shape", "figures_of", "metric_rows", "random_tokens", "run_file", "train_figures"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and the precision that it is trained in."""

    layers: int = 2
    hidden: int = 64
    ffn: int = 176
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 1024
    micro_batch: int = 1
    precision: Mapping[str, Any] = field(default_factory=lambda: {"type": "autocast"})

    def sized(self, bench: Bench) -> Shape:
        """Return the shape itself, or for small runs a tiny one of the same precision."""
        return Shape(precision=self.precision) if bench.small else self

    def model(self, bench: Bench, sequence: int) -> dict[str, Any]:
        """Return section ``model`` of a run."""
        return {
            "name": "llama",
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": sequence,
            "rope_theta": 500000.0,
            "compile": bench.compiles,
            "optim": {"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "sched": {}},
        }


SHAPES = {
    "1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocabulary=128256, micro_batch=4),
    "3b": Shape(
        layers=28,
        hidden=3072,
        ffn=8192,
        heads=24,
        kv_heads=8,
        vocabulary=128256,
        micro_batch=2,
        precision={"type": "mixed_precision"},
    ),
    "8b": Shape(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        vocabulary=128256,
        micro_batch=2,
        precision={"type": "bf16SR", "optimizer_state": "bfloat16"},
    ),
}
"""Llama 3.2 1B and 3B without tied embeddings, Llama 3 8B. By ``nxdt plan``: 55, 90 and 91 GiB at 4,096 tokens."""


def run_file(bench: Bench, name: str, *, steps: int, every: int, **sections: Mapping[str, Any]) -> Path:
    """Write the YAML file of a run that logs every ``every`` steps and saves nothing.

    Args:
        bench: its scratch folder holds the file and the run.
        name: of the run.
        steps: optimizer steps.
        every: steps between two rows of metrics.
        sections: of the configuration; they are merged over the defaults key by key.
    """
    held: dict[str, dict[str, Any]] = {
        "trainer": {"max_steps": steps, "log_every_n_steps": every, "gradient_clip_val": 1.0},
        "exp_manager": {"exp_dir": str(bench.work / "runs"), "create_tensorboard_logger": False},
        "checkpoint": {"enabled": False},
    }
    for section, keys in sections.items():
        held[section] = {**held.get(section, {}), **keys}
    path = bench.work / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, "seed": 1234, **held}, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def random_tokens(bench: Bench, shape: Shape, sequence: int, sequences: int) -> dict[str, Any]:
    """Return section ``data`` of a run over random tokens of the whole vocabulary, in ``.bin/.idx`` files."""
    import numpy as np
    from nxdt_plugin_megatron_data.writer import IndexedWriter

    prefix = bench.work / f"tokens-{sequence}"
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, sequence * sequences + 1)
    with IndexedWriter(prefix, np.dtype("<i4")) as writer:
        writer.add(tokens)
    return {
        "name": "megatron-data",
        "data_prefix": str(prefix),
        "seq_length": sequence,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.micro_batch,
    }


def train_figures(bench: Bench, what: str, path: Path, **more: Any) -> None:
    """Train the run of a file and record its figures; the first interval of its log is warm-up and compilation."""
    from nxdt_core.progress import PROGRESS, process_age_s

    PROGRESS.begin_start(process_age_s())
    from nxdt_core.config import load
    from nxdt_core.training import train

    PROGRESS.spent("import")
    config = load(str(path), [])
    PROGRESS.spent("configuration")
    planned = _planned_bytes(config)
    PROGRESS.spent("plan")
    train(config)
    every = config.run.trainer.log_every_n_steps
    bench.row(what, **figures_of(metric_rows(config.run_dir), every=every, planned=planned), **more)


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def figures_of(rows: list[dict[str, Any]], *, every: int, planned: int | None) -> dict[str, Any]:
    """Return medians over the logged intervals after the first."""
    timed = rows[1:]
    peak = max(row["max_memory_bytes"] for row in rows)
    return {
        "tokens_per_s": _median(timed, "tokens_per_s"),
        "mfu": _median(timed, "mfu"),
        "mfu_palm": _median(timed, "mfu_palm"),
        "step_ms": 1000 * (_median(timed, "step_time_s") or 0.0),
        "data_wait_ms": 1000 * (_median(timed, "data_wait_s") or 0.0),
        "warm_up_s": rows[0]["step_time_s"] * every,
        **{name: seconds for name, seconds in rows[0].items() if name.startswith("start_")},
        "peak_gib": peak / GIB,
        "planned_gib": None if planned is None else planned / GIB,
        "loss": rows[-1]["loss"],
        "skipped": rows[-1]["skipped_steps"],
    }


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _planned_bytes(config: ResolvedConfig) -> int | None:
    """Return the memory that ``nxdt plan`` estimates; None where the estimate fails: training goes ahead."""
    from nxdt_core.training.plan import plan

    try:
        return plan(config, memory_bytes=0).estimate.fullest.memory.total
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return None
