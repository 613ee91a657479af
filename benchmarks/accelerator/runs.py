"""Runs that stages measure: a configuration file, then what ``nxdt train`` calls, then the run's own metrics.

:mod:`accelerator.measurements.watch` observes their last steps, which are not timed.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerator.bench import GIB, Bench
from accelerator.traces import report_trace

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.protocols.estimate import Memory

__all__ = [
    "SHAPES",
    "WATCH",
    "Shape",
    "length",
    "measure",
    "metric_rows",
    "random_tokens",
    "run_file",
    "steps_of",
    "train_figures",
]

_EVERY, _INTERVALS, _WATCHED = 4, 4, 5
"""Steps of an interval; intervals with the first, which is warm-up; steps after them that are observed."""
WATCH = {"local": [str(Path(__file__).with_name("measurements") / "watch_plugin.py")]}
"""Section ``plugins`` of a run with the callback ``watch``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and the precision that it is trained in."""

    layers: int = 2
    hidden: int = 64
    ffn: int = 192
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 1024
    micro_batch: int = 1
    precision: Mapping[str, Any] = field(default_factory=lambda: {"type": "autocast"})

    @property
    def parameters(self) -> int:
        """Return the number of parameters; the vocabulary's two matrices are not tied."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return int(self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden)

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


def length(bench: Bench) -> int:
    """Return the tokens of a sequence."""
    return 128 if bench.small else 4096


def steps_of(bench: Bench) -> int:
    """Return the steps of a run that :func:`measure` trains."""
    return (1 if bench.small else _EVERY) * _INTERVALS + _WATCHED


def measure(
    bench: Bench, what: str, shape: Shape, *, data: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]
) -> None:
    """Train a shape: rows of its speed and memory, of its memory by category, and of the kernels of some steps.

    Args:
        bench: decides the size.
        what: name of the rows.
        shape: of the model; small runs train a tiny one.
        data: section ``data``; random tokens where it is None.
        sections: of the configuration, merged over those of the shape key by key.
    """
    with bench.part(what):
        sized, sequence, steps = shape.sized(bench), length(bench), steps_of(bench)
        name = re.sub("[^a-z0-9]+", "-", what.lower())
        watch = {
            "name": "watch",
            "after": steps - _WATCHED,
            "trace": str(bench.rows.with_name(f"{name}.trace.json.gz")),
        }
        path = run_file(
            bench,
            name,
            steps=steps,
            every=(steps - _WATCHED) // _INTERVALS,
            trainer={"callbacks": [watch]},
            plugins=WATCH,
            data=data or random_tokens(bench, sized, sequence, steps * sized.micro_batch),
            precision=sized.precision,
            **{**sections, "model": {**sized.model(bench, sequence), **sections.get("model", {})}},
        )
        train_figures(bench, what, path, intervals=_INTERVALS, precision=" ".join(map(str, sized.precision.values())))


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
    from nxdt_plugin_megatron_data.indexed_files import write_documents

    prefix = bench.work / f"tokens-{sequence}"
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, sequence * sequences + 1)
    write_documents(prefix, np.dtype("<i4"), [[tokens]])
    return {
        "name": "megatron-data",
        "data_prefix": str(prefix),
        "seq_length": sequence,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.micro_batch,
    }


def train_figures(bench: Bench, what: str, path: Path, *, intervals: int | None = None, **more: Any) -> None:
    """Train the run of a file and record its figures; the first interval of its log is warm-up and compilation.

    Args:
        bench: gets the rows.
        what: name of the rows.
        path: of the file.
        intervals: of the log that count; the rest is observed by the callback ``watch``.
        more: figures of the first row.
    """
    from nxdt_core.config import load
    from nxdt_core.run import train
    from nxdt_core.system.progress import PROGRESS

    PROGRESS.counted_at = time.monotonic() - bench.imports_s
    PROGRESS.spent("import")
    config = load(str(path), [])
    PROGRESS.spent("configuration")
    train(config)
    planned = _planned(config)
    rows = metric_rows(config.run_dir)[:intervals]
    found = {} if intervals is None else json.loads((config.run_dir / "watched.json").read_text(encoding="utf-8"))
    figures = _figures_of(rows, every=config.run.trainer.log_every_n_steps)
    figures["planned_gib"] = None if planned is None else planned.total / GIB
    bench.row(what, **figures, **more)
    if not found:
        return
    planned_parts = {} if planned is None else {**asdict(planned), "total": planned.total}
    for kind, parts in {"planned": planned_parts, "measured": found["memory"]}.items():
        bench.row(f"{kind}, {what}", **{f"{name}_gib": size / GIB for name, size in parts.items()})
    report_trace(bench, Path(found["trace"]), steps=_WATCHED)


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _figures_of(rows: list[dict[str, Any]], *, every: int) -> dict[str, Any]:
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
        **start_of(rows[0]),
        "peak_gib": peak / GIB,
        "loss": rows[-1]["loss"],
        "skipped_steps": rows[-1]["skipped_steps"],
        **{key: value for key, value in rows[0].items() if key.startswith("start_")},
    }


def start_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds until the end of the first step, in sum and by part, of the first row of a run's metrics."""
    parts = {name: seconds for name, seconds in row.items() if name.startswith("start_")}
    return {"first_step_s": sum(parts.values()), **parts}


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _planned(config: ResolvedConfig) -> Memory | None:
    """Return the memory that ``nxdt plan`` estimates; None where the estimate fails."""
    from nxdt_core.train.plan import plan

    try:
        return plan(config, memory_bytes=0).estimate.fullest.memory
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return None
