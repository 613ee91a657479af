"""CPU seconds that the light commands of ``nxdt`` take to start, against their budgets and a bare interpreter.

Claim: ``nxdt --help`` takes at most 250 ms of CPU, ``nxdt plugins list`` 300 ms and ``nxdt config check`` 400 ms,
with 40 plugins and 300 unrelated distributions installed, and none of them imports torch.

Runs are interleaved, so that a machine that drifts slows all commands equally; CPU time (user + system) of the
child is counted, not wall time. The exit status is 1 where a budget is not kept.

    python benchmarks/startup/cli_start.py --repeats 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxdt_core.config.sources import find_recipe
from nxdt_core.kernel import Kernel
from tests.distributions import write_distribution

PLUGINS = 40
UNRELATED = 300
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
"""``sitecustomize`` of every child: importing torch raises, so that a command that does it fails here."""

ENTRY = """\
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_optimizers():
    return [Component(name="{name}", target="{name}.build:build", summary="a fake")]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One command line, and how much CPU it may take."""

    name: str
    args: tuple[str, ...]
    budget_ms: float | None = None


SUBJECTS = (
    Subject(name="python -c pass", args=("-c", "pass")),
    Subject(name="nxdt --help", args=("-m", "nxdt_core", "--help"), budget_ms=250),
    Subject(name="nxdt plugins list", args=("-m", "nxdt_core", "plugins", "list"), budget_ms=300),
    Subject(name="nxdt config check", args=("-m", "nxdt_core", "config", "check", "run.yaml"), budget_ms=400),
)


def furnish(root: Path) -> None:
    """Fill ``root/site``, which is put on the path, with fake distributions; write a configuration into ``root``."""
    site = root / "site"
    site.mkdir()
    for number in range(UNRELATED):
        script = f"[console_scripts]\nrun{number} = unrelated:run\n"
        write_distribution(site, f"unrelated{number:03d}", entry_points=script, requires=())
    for number in range(PLUGINS):
        name = f"fakeplugin{number:02d}"
        write_distribution(site, name, plugins={name: name}, files={f"{name}.py": ENTRY.format(name=name)})
    (site / "sitecustomize.py").write_text(NO_TORCH)
    (root / "run.yaml").write_text(find_recipe(Kernel.start(), "llama-tiny").text)


def cpu_ms(subject: Subject, root: Path) -> float:
    """Run once; user and system time of the child in milliseconds."""
    child = subprocess.Popen(
        [sys.executable, *subject.args],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "site")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    complaint = child.stderr.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{subject.name} failed with status {child.returncode}:\n{complaint}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def report(subject: Subject, times: Sequence[float], bare: float) -> bool:
    """Print one line; whether the budget is kept."""
    median = statistics.median(times)
    line = f"{subject.name:<20}{median:7.0f}{min(times):7.0f}{max(times):7.0f}{median / bare:8.1f}"
    if subject.budget_ms is None:
        print(f"{line}       -")
        return True
    print(f"{line}{subject.budget_ms:8.0f}{median / subject.budget_ms:8.2f}")
    return median <= subject.budget_ms


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=11, help="runs of each command (default: %(default)s)")
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {subject.name: [] for subject in SUBJECTS}
    with tempfile.TemporaryDirectory() as directory:
        furnish(Path(directory))
        for subject in SUBJECTS:
            cpu_ms(subject, Path(directory))  # writes byte code, which later runs read
        for _ in range(repeats):
            for subject in SUBJECTS:
                times[subject.name].append(cpu_ms(subject, Path(directory)))
    print(f"{PLUGINS} fake plugins, {UNRELATED} unrelated distributions, {repeats} interleaved runs; CPU ms")
    print(f"{'command':<20}{'median':>7}{'min':>7}{'max':>7}{'x bare':>8}{'budget':>8}{'share':>8}")
    bare = statistics.median(times[SUBJECTS[0].name])
    kept = [report(subject, times[subject.name], bare) for subject in SUBJECTS]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
