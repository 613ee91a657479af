"""Whether the device computes what the CPU does: tests, losses, resumed runs, steps that are not finite."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from accelerator.bench import Bench
from accelerator.runs import Shape, measure, metric_rows

__all__ = ["checks", "marked_tests", "runs"]

_ROOT = Path(__file__).parents[3]
_MARK = "pytest.mark.accelerator"
_AS_WRITTEN = Shape(layers=8, hidden=768, ffn=2048, heads=12, kv_heads=4, vocabulary=4096, micro_batch=2)


def checks(bench: Bench) -> None:
    """Memory and kernels of layers that are not compiled; the tests that are skipped without an accelerator."""
    for precision, cudnn in (("fp32", True), ("autocast", True), ("autocast", False)):
        shape = replace(_AS_WRITTEN, precision={"type": precision})
        torch.backends.cuda.enable_cudnn_sdp(cudnn)  # whose backward may need more memory than the plan says
        measure(
            bench, f"layers as written, {precision}{'' if cudnn else ', no cuDNN'}", shape, model={"compile": False}
        )
    torch.backends.cuda.enable_cudnn_sdp(True)
    report = bench.work / "report.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "accelerator", f"--junitxml={report}"]
    files = map(str, marked_tests(_ROOT))
    subprocess.run([*command, "-p", "no:cacheprovider", *files], cwd=_ROOT, check=False)
    with bench.part("tests of an accelerator"):
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        wrong = counts["failures"] + counts["errors"] + (0 if bench.small else counts["skipped"])
        bench.failed |= bool(wrong) or not counts["tests"]
        bench.row("tests of an accelerator", **counts)
        for case in suite.iter("testcase"):
            for problem in (*case.iter("failure"), *case.iter("error")):
                bench.row(case.get("name", ""), outcome=problem.get("message", "").partition("\n")[0][:200])


def marked_tests(root: Path) -> list[Path]:
    """Return the files with tests that carry the mark ``accelerator``."""
    folders = (root / "tests", *root.glob("plugins/*/*/tests"))
    paths = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    return [path.relative_to(root) for path in paths if _MARK in path.read_text(encoding="utf-8")]


def runs(bench: Bench) -> None:
    """Small runs on the device, each compared with another run."""
    steps = 4 if bench.small else 20
    with bench.part("losses on the CPU and on the device, float32"):
        command = [*(sys.executable, "-m", "nxdt_core", "train"), "recipe:llama-tiny", *_keys(bench, "device", steps)]
        subprocess.run(command, check=True)
        device = _losses(bench.work / "runs" / "device")
        cpu = _train(bench, "cpu", steps, "trainer.accelerator=cpu")
        bench.row("losses on the CPU and on the device, float32", **_apart(cpu, device))
    for name in ("autocast", "mixed_precision", "bf16SR"):
        what = f"losses in {name} and in float32"
        with bench.part(what):
            bench.row(what, **_apart(device, _train(bench, name, steps, f"precision.type={name}")))
    if bench.compiles:
        with bench.part(what := "losses compiled and not"):
            bench.row(what, **_apart(device, _train(bench, "compiled", steps, "model.compile=true")))
    with bench.part("resume"):
        _resume(bench, steps)
    with bench.part("steps that are not finite"):
        _not_finite(bench)


def _resume(bench: Bench, steps: int) -> None:
    """A run that stopped half-way against one that did not; a third run says what the device itself repeats."""
    for name in ("whole", "again"):
        _train(bench, name, steps, "checkpoint.enabled=true")
    for end in (steps // 2, steps):
        _train(bench, "stopped", end, "checkpoint.enabled=true")
    bench.row("resumed and uninterrupted run", **_weights_apart(bench, "whole", "stopped"))
    bench.row("the same run twice", **_weights_apart(bench, "whole", "again"))


def _not_finite(bench: Bench) -> None:
    """The first update makes weights that give no finite gradient."""
    from nxdt_core.errors.training import StepNotFinite

    broken = ("model.optim.lr=1e30", "trainer.gradient_clip_val=null", "checkpoint.enabled=true")
    _train(bench, "skips", 4, *broken, "trainer.nonfinite=skip")
    skipped = metric_rows(bench.work / "runs" / "skips")[-1]["skipped_steps"]
    finite = all(bool(weight.isfinite().all()) for weight in _weights(bench, "skips").values())
    try:
        _train(bench, "stops", 4, *broken, "trainer.nonfinite=stop")
        stopped = None
    except StepNotFinite as error:
        stopped = error.step
    bench.failed |= not (skipped and finite and stopped)
    bench.row("steps that are not finite", skipped=skipped, weights_finite=finite, stopped_at_step=stopped)


def _keys(bench: Bench, name: str, steps: int) -> list[str]:
    return [
        f"name={name}",
        f"trainer.max_steps={steps}",
        f"exp_manager.exp_dir={bench.work / 'runs'}",
        "exp_manager.create_tensorboard_logger=false",
        "trainer.val_check_interval=null",
        "trainer.log_every_n_steps=1",
        "checkpoint.enabled=false",
        "data.micro_batch_size=8",
        *(("data.global_batch_size=8", "data.seq_length=32", "model.num_layers=2") if bench.small else ()),
    ]


def _train(bench: Bench, name: str, steps: int, *keys: str) -> list[float]:
    from nxdt_core.config import load
    from nxdt_core.run import train

    config = load("recipe:llama-tiny", [*_keys(bench, name, steps), *keys])
    train(config)
    return _losses(config.run_dir)


def _losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in metric_rows(run_dir)]


def _apart(first: Iterable[float], second: Iterable[float]) -> dict[str, Any]:
    pairs = list(zip(first, second, strict=True))
    return {
        "steps": len(pairs),
        "first_difference": abs(pairs[0][0] - pairs[0][1]),
        "largest_difference": max(abs(a - b) for a, b in pairs),
        "last_losses": f"{pairs[-1][0]:.5f}, {pairs[-1][1]:.5f}",
    }


def _weights_apart(bench: Bench, first: str, second: str) -> dict[str, Any]:
    one, two = _weights(bench, first), _weights(bench, second)
    differences = {name: float((weight.float() - two[name].float()).abs().max()) for name, weight in one.items()}
    return {
        "tensors": len(one),
        "bitwise": all(weight.equal(two[name]) for name, weight in one.items()),
        "largest_difference": max(differences.values()),
    }


def _weights(bench: Bench, name: str) -> Any:
    from nxdt_core import checkpoint

    store, _ = checkpoint.locate(str(bench.work / "runs" / name / "checkpoints"))
    return checkpoint.load_model(store, checkpoint.find_checkpoint(store, None, warn=print))
