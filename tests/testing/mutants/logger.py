"""Wrong loggers, each with one mistake that a real author could make: a plugin file, and a test file.

Not collected by name: ``test_logger_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict

from pytorch_lightning.loggers import Logger

from nxdt_core.api import LoggerComponent, hookimpl
from nxdt_core.testing.logger_contract import LoggerContract

FILE = "figures.jsonl"
MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(Logger):
    """A line of JSON per call."""

    name = "lines"
    version = None
    mode = "a"

    def __init__(self, config, run_dir):
        super().__init__()
        self.file = open(run_dir / FILE, self.mode)  # noqa: SIM115

    def log_metrics(self, metrics, step=None):
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_hyperparams(self, params, *words, **more):
        pass

    def save(self):
        self.file.flush()

    def finalize(self, status):
        self.file.flush()


@mutant
class OnlyLooksLikeOne:
    name, version = "lines", None

    def __init__(self, config, run_dir):
        self.right = Right(config, run_dir)

    def __getattr__(self, name):
        return getattr(self.__dict__["right"], name)


@mutant
class HasAFunctionAsItsName(Right):
    def name(self):
        return "lines"


@mutant
class CountsItsCalls(Right):
    calls = 0

    def log_metrics(self, metrics, step=None):
        self.calls += 1
        super().log_metrics(metrics, self.calls)


@mutant
class WritesOverEarlierFigures(Right):
    mode = "w"


@mutant
class LeavesAThread(Right):
    def finalize(self, status):
        super().finalize(status)
        threading.Thread(target=time.sleep, args=(8,), name="writer").start()


@mutant
class RefusesNaN(Right):
    def log_metrics(self, metrics, step=None):
        self.file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")


@mutant
class TakesFlatConfigurations(Right):
    def log_hyperparams(self, params, *words, **more):
        for name, value in params.items():
            self.file.write(f"{name}={value:g}\n")


@hookimpl
def nxdt_loggers():
    return [LoggerComponent(name=cls.__name__, target=f"{__name__}:{cls.__name__}") for cls in MUTANTS]


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
