"""Pre-training by ``nxdt train``: tokens per second, MFU in both conventions, memory, kernels, the time to start."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from accelerator.bench import GIB, Bench
from accelerator.runs import SHAPES, Shape, length, measure, metric_rows, random_tokens, run_file, start_of

__all__ = ["command", "pretrain", "several"]


def pretrain(
    bench: Bench, shape: str, precisions: Sequence[Mapping[str, str]] = ({},), layers: int | None = None
) -> None:
    """One shape at 4,096 tokens, compiled, in its own precision or in each of several.

    Args:
        bench: gets the rows.
        shape: name of the shape.
        precisions: sections ``precision``; an empty one is that of the shape.
        layers: of the model, where they are fewer than the shape's.
    """
    whole = SHAPES[shape]
    for precision in precisions:
        what = " ".join(["nxdt", shape, *([f"{layers} layers"] if layers else []), *precision.values()])
        measure(bench, what, replace(whole, layers=layers or whole.layers, precision=precision or whole.precision))


def command(bench: Bench, shape: str) -> None:
    """The command ``nxdt train`` for one step of a shape: seconds to the end of that step, and of the process."""
    sized, sequence = SHAPES[shape].sized(bench), length(bench)
    with bench.part(f"command {shape}"):
        data = random_tokens(bench, sized, sequence, sized.micro_batch)
        begun = time.monotonic()
        path = run_file(
            bench,
            "command",
            steps=1,
            every=1,
            model=sized.model(bench, sequence),
            data=data,
            precision=sized.precision,
        )
        _output([sys.executable, "-m", "nxdt_core", "train", str(path)])
        seconds = time.monotonic() - begun
        (metrics,) = bench.work.glob("runs/**/metrics.jsonl")
        bench.row(f"command {shape}", command_s=seconds, **start_of(metric_rows(metrics.parent)[0]))


def several(bench: Bench, shape: str) -> None:
    """A shape by ``nxdt train`` on 1, 2, 4 and 8 devices, sharded over data or over tensor parallel ranks.

    The command of torchtitan trains the same shape in bfloat16, where it is installed and an accelerator is present.
    """
    sized, sequence, steps = SHAPES[shape].sized(bench), length(bench), 6 if bench.small else 20
    devices = 2 if bench.small else torch.accelerator.device_count()
    if devices < 2:
        bench.row("several devices", outcome="this machine has one")
        return
    alone: dict[str, float] = {}
    for count in (n for n in (1, 2, 4, 8) if n <= devices):
        for layout in ("FSDP", "TP") if count > 1 else ("FSDP",):
            tp = count if layout == "TP" else 1
            batch = sized.micro_batch * count // tp
            with bench.part(f"nxdt, {layout} {count}"):
                data = random_tokens(bench, sized, sequence, steps * batch)
                path = run_file(
                    bench,
                    f"{layout.lower()}-{count}",
                    steps=steps,
                    every=2,
                    trainer={"devices": count},
                    distributed_strategy={
                        "zero_stage": 3 if tp == 1 else 1,
                        "tensor_model_parallel_size": tp,
                        "sequence_parallel": tp > 1,
                    },
                    model=sized.model(bench, sequence),
                    data={**data, "global_batch_size": batch},
                    precision=sized.precision,
                )
                _output([sys.executable, "-m", "nxdt_core", "train", str(path)])
                rows = metric_rows(next(bench.work.glob(f"runs/{layout.lower()}-{count}")))[1:]
                rate = statistics.median(row["tokens_per_s"] for row in rows) / count
                peak = max(row["max_memory_bytes"] for row in rows) / GIB
                share = rate / alone.setdefault("nxdt", rate)
                bench.row(f"nxdt, {layout} {count}", tokens_per_s_each=rate, of_one_device=share, peak_gib=peak)
            if bench.small:
                continue  # torchtitan's command needs an accelerator
            with bench.part(f"torchtitan, {layout} {count}"):
                rate, peak = _torchtitan_command(bench, sized, sequence, steps, count, tp)
                share = rate / alone.setdefault("torchtitan", rate)
                bench.row(f"torchtitan, {layout} {count}", tokens_per_s_each=rate, of_one_device=share, peak_gib=peak)


def _torchtitan_command(
    bench: Bench, shape: Shape, sequence: int, steps: int, devices: int, tp: int
) -> tuple[float, float]:
    """Return the tokens per second of one device and the peak in GiB that torchtitan's Llama 3 8B logs, as medians."""
    folder = bench.work / "torchtitan"
    if not folder.exists():
        words = [f"w{number}" for number in range(4096)]
        (folder / "text").mkdir(parents=True)
        (folder / "tokenizer.json").write_text(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "pre_tokenizer": {"type": "WhitespaceSplit"},
                    "model": {
                        "type": "WordLevel",
                        "unk_token": words[0],
                        "vocab": {word: number for number, word in enumerate(words)},
                    },
                }
            ),
            encoding="utf-8",
        )
        special = json.dumps({"bos_token": words[0], "eos_token": words[0]})
        (folder / "tokenizer_config.json").write_text(special, encoding="utf-8")
        draw = random.Random(0)
        documents = (json.dumps({"text": " ".join(draw.choices(words, k=sequence))}) for _ in range(512))
        (folder / "text" / "train.jsonl").write_text("\n".join(documents), encoding="utf-8")
    text = _output(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}", "-m", "torchtitan.train"),
            *("--model.name=llama3", "--model.flavor=8B", f"--model.hf_assets_path={folder}"),
            *("--training.dataset=c4_test", f"--training.dataset_path={folder / 'text'}", "--training.dtype=bfloat16"),
            *(f"--training.seq_len={sequence}", f"--training.local_batch_size={shape.micro_batch}"),
            *(f"--training.steps={steps}", "--metrics.log_freq=2", "--metrics.disable_color_printing"),
            *(f"--parallelism.tensor_parallel_degree={tp}", "--activation_checkpoint.mode=none", "--compile.enable"),
            f"--job.dump_folder={folder / 'out'}",
        ]
    )
    steps_logged = re.findall(r"memory: +([\d.]+)GiB.*?tps: ([\d,]+)", text)[1:]
    if not steps_logged:
        raise ValueError("torchtitan logged no rate")
    rates = [float(rate.replace(",", "")) for _, rate in steps_logged]
    return statistics.median(rates), max(float(memory) for memory, _ in steps_logged)


def _output(arguments: Sequence[str]) -> str:
    """Return and print what a command writes; raise where it fails."""
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    done.check_returncode()
    return done.stdout
