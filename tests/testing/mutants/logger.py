"""Wrong loggers, each with one mistake that a real author could make: a plugin file, and a test file.

Not collected by name: ``test_logger_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict

from nxdt_testing.callback_contract import LoggerContract

from nxdt_core.api import Callback, Component, hookimpl

FILE = "figures.jsonl"
MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(Callback):
    """A line of JSON per call."""

    mode = "a"

    def __init__(self, config, run_dir):
        self.file = open(run_dir / FILE, self.mode)  # noqa: SIM115

    def on_log(self, run, metrics):
        self.write(run.step, metrics)

    def write(self, step, metrics):
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self, run):
        self.file.close()


@mutant
class OnlyLooksLikeOne:
    def __init__(self, config, run_dir):
        self.right = Right(config, run_dir)

    def __getattr__(self, name):
        return getattr(self.__dict__["right"], name)


@mutant
class CountsItsCalls(Right):
    calls = 0

    def write(self, step, metrics):
        self.calls += 1
        super().write(self.calls, metrics)


@mutant
class WritesOverEarlierFigures(Right):
    mode = "w"


@mutant
class LeavesAThread(Right):
    def close(self, run):
        super().close(run)
        threading.Thread(target=time.sleep, args=(8,), name="writer").start()


@mutant
class RefusesNaN(Right):
    def write(self, step, metrics):
        self.file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")


@hookimpl
def nxdt_callbacks():
    return [Component(name=cls.__name__, target=f"{__name__}:{cls.__name__}") for cls in MUTANTS]


def read(self, run_dir):
    found = defaultdict(dict)
    for line in (run_dir / FILE).read_text().splitlines():
        row = json.loads(line)
        found[row.pop("step")].update(row)
    return found


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = type(
        f"Test{_mutant.__name__}",
        (LoggerContract,),
        {"entry": _mutant.__name__, "plugins": (__file__,), "read": read},
    )
