"""Run the recipes that train on a CPU in minutes, and plan all of them, for the gallery of the documentation.

    python scripts/gallery.py                 run and plan all recipes
    python scripts/gallery.py runs [NAME...]  train these and write docs/gallery/NAME.csv and docs/gallery/runs.json
    python scripts/gallery.py plans           write docs/gallery/plans.json

``scripts/docs_site/gallery.py`` writes the pages from these files. A test fails where a recipe has no plan, or where
its configuration has changed since it was planned.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "gallery"
RUNS, PLANS = DATA / "runs.json", DATA / "plans.json"

STEPS: dict[str, tuple[str, ...]] = {
    "llama-tiny": ("nxdt train recipe:llama-tiny",),
    "llama-small": ("nxdt train recipe:llama-small",),
    "mistral-tiny": ("nxdt train recipe:mistral-tiny",),
    "mixtral-tiny": ("nxdt train recipe:mixtral-tiny",),
    "gpt-tiny": ("nxdt train recipe:gpt-tiny",),
    "hf-tiny": ("nxdt train recipe:hf-tiny",),
    "hf-data-tiny": ("nxdt train recipe:hf-data-tiny",),
    "gpt-indexed-tiny": (
        "nxdt data preprocess --input package://nxdt_plugin_text/data/kjv.txt --separator '\\n\\n' "
        "--output-prefix data/kjv --tokenizer byte",
        "nxdt train recipe:gpt-indexed-tiny data.data_prefix=data/kjv",
    ),
    "llama-tiny-sft": ("nxdt train recipe:llama-tiny-sft",),
    "gpt-tiny-sft": ("nxdt train recipe:gpt-tiny-sft",),
    "llama-tiny-lora": (
        "nxdt train recipe:llama-tiny-sft",
        "nxdt train recipe:llama-tiny-lora checkpoint.resume_from=nxdt_experiments/llama-tiny-sft/checkpoints "
        "checkpoint.weight_init_only=true",
    ),
    "llama-tiny-dpo": ("nxdt train recipe:llama-tiny-dpo",),
    "llama-tiny-kto": ("nxdt train recipe:llama-tiny-kto",),
    "llama-tiny-orpo": ("nxdt train recipe:llama-tiny-orpo",),
    "llama-tiny-reward": ("nxdt train recipe:llama-tiny-reward",),
}
"""Recipe → commands that train it; the last one is the run that is shown."""

COLUMNS = ("step", "consumed_tokens", "loss", "validation_loss", "lr", "grad_norm")
"""Columns of the files with curves."""


def main(*arguments: str) -> int:
    """Run, plan, or both."""
    what, names = (arguments[0], arguments[1:]) if arguments else ("all", ())
    if what not in ("all", "runs", "plans") or not STEPS.keys() >= set(names):
        print(__doc__)
        return 2
    DATA.mkdir(exist_ok=True)
    if what != "plans":
        write_runs(names or tuple(STEPS))
    if what != "runs":
        write(PLANS, dict(plans()))
    return 0


def write_runs(names: Sequence[str]) -> None:
    """Train recipes one after the other, and keep the curves and the record of each."""
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            record = {"commands": list(STEPS[name]), **run(STEPS[name], Path(directory))}
            rows = curves(Path(directory) / "nxdt_experiments" / name)
        with (DATA / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        records = {**(json.loads(RUNS.read_text()) if RUNS.exists() else {}), name: record}
        write(RUNS, {key: records[key] for key in STEPS if key in records})
        print(name, record["cpu_seconds"], "CPU-seconds", flush=True)


def run(commands: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run the commands in an empty directory, and return where and when that was."""
    import torch

    commit = source()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # so that other work on the machine costs time alone
    for command in commands:
        words = [sys.executable, "-m", "nxdt_core", *shlex.split(command)[1:]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(words, cwd=directory, env=environment, check=True, **quiet)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": f"one thread of {processor()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def source() -> str:
    """Return the commit of the sources, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "nxdt_core", "plugins")
    return f"{git('rev-parse', '--short=10', 'HEAD')}{' with changes' if changed else ''}"


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def curves(run_dir: Path) -> list[dict[str, Any]]:
    """Return a row for each step with a training or validation loss."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = {key: shortened(row[key]) for key in COLUMNS if row.get(key) is not None}
    for line in (run_dir / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {"step": row["step"]})["validation_loss"] = shortened(row["loss"])
    return [rows[step] for step in sorted(rows)]


def shortened(value: float) -> float:
    """Return a number with six digits, an integer as it is."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and facts of every recipe: what it configures, and what `nxdt plan` computes."""
    from nxdt_core.config.sources import list_recipes
    from nxdt_core.kernel import Kernel

    for recipe in list_recipes(Kernel.start()):
        if recipe.path.is_relative_to(ROOT / "plugins"):
            yield recipe.name, facts(recipe.name)
            print(recipe.name, "planned", flush=True)


def facts(name: str) -> dict[str, Any]:
    """Return what the configuration of a recipe says, with the numbers of its plan."""
    from nxdt_core.config import load
    from nxdt_core.train.plan import plan

    config = load(f"recipe:{name}")
    made = plan(config).estimate
    run = config.run
    return {
        "configuration": fingerprint(name),
        "model": run.model.name,
        "data": run.data.name,
        "nodes": run.trainer.num_nodes,
        "steps": run.trainer.max_steps,
        "sequence": run.data.seq_length,
        "sequences_per_step": run.data.global_batch_size,
        "layout": list(made.layout),
        "parameters": made.parameters,
        "trained_parameters": made.trained,
        "memory_bytes": made.fullest.memory.total,
        "checkpoint_bytes": made.checkpoint_bytes,
        "pipeline_bubble": round(made.bubble, 4),
        "flops_per_token": made.flops_per_token,
    }


def fingerprint(name: str) -> str:
    """Return a digest of a recipe's YAML and of those that it builds on."""
    from nxdt_core.config.sources import find_recipe
    from nxdt_core.kernel import Kernel

    digest, kernel = hashlib.sha256(), Kernel.start()
    while name:
        text = find_recipe(kernel, name).text
        digest.update(text.encode())
        lines = [line for line in text.splitlines() if line.startswith("base: recipe:")]
        name = lines[0].removeprefix("base: recipe:").strip() if lines else ""
    return digest.hexdigest()[:16]


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON that differs line by line."""
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
