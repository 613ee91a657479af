"""A place whose file system has no locks, as some network file systems: one run at a time all the same."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import processes
from tests.sampling import slow

_ERRORS = ("ENOLCK", "EOPNOTSUPP", "ENOSYS")
_IN_PYTHON = """
import fcntl
import os

def refused(*_):
    number = int(os.environ["NO_LOCKS_ERRNO"])
    raise OSError(number, os.strerror(number))

fcntl.flock = refused
"""
_SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from tests.checkpoint.saving import save_checkpoint
from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointFacts, open_storage
from nxdt_core.cli import main
from nxdt_core.data.cache import cached_arrays
from nxdt_core.errors.checkpoints import StoreInUse

@dataclass
class Arrays:
    numbers: numpy.ndarray

where, said = Path(sys.argv[1]), []
storage = open_storage(str(where / "store"))

def save(step, ownership):
    save_checkpoint(
        storage, step=step, model={"w": torch.full((3,), float(step))}, optimizer={}, state={},
        facts=CheckpointFacts(fencing=ownership.fencing), before_commit=ownership.check,
    )

with checkpoint.owned(storage, run="first", say=said.append) as first:
    for step in (1, 2):
        save(step, first)
    try:
        with checkpoint.owned(open_storage(storage.uri), run="second", say=said.append):
            raise AssertionError("two runs own one place")
    except StoreInUse as error:
        assert "'first'" in error.what()
assert all("a lease instead of a lock" in line for line in said) and len(said) == 2, said
with checkpoint.owned(storage, run="third", say=said.append) as third:
    assert third.fencing > first.fencing
    save(3, third)
assert main(["checkpoint", "prune", storage.uri, "--keep-last", "1"]) == 0
assert [(each.step, each.state) for each in checkpoint.list_checkpoints(storage)] == [(3, "committed")]
assert checkpoint.verify(storage, 3) == []

on_error = []
made = cached_arrays(where / "cache", "numbers", Arrays, lambda: Arrays(numpy.arange(5)), on_error.append, bool)
assert made.numbers.tolist() == [0, 1, 2, 3, 4]
assert len(on_error) == 1, "without any locks, of the temporary directory neither, nothing is kept"
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("taking locks away from a process needs Linux and a C compiler")
    path = tmp_path_factory.mktemp("locks") / "no_locks.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, Path(__file__).with_name("no_locks.c")], check=True)
    return path


@pytest.mark.parametrize("who", ["python", slow("the C library")])
def test_a_place_without_locks_is_owned_saved_to_and_pruned(
    tmp_path: Path, request: pytest.FixtureRequest, who: str, some: Callable[[Sequence[str], int], list[str]]
) -> None:
    """Python's own functions refuse to lock, or those of the C library that they call, for libraries as well."""
    script, environment = _IN_PYTHON + _SCRIPT, {"OMP_NUM_THREADS": "1"}
    if who == "the C library":
        script, environment["LD_PRELOAD"] = _SCRIPT, str(request.getfixturevalue("library"))
    for name in some(_ERRORS, 1):
        place = tmp_path / name
        place.mkdir()
        done = processes.run(
            [sys.executable, "-c", script, str(place)],
            env={**os.environ, **environment, "NO_LOCKS_ERRNO": str(getattr(errno, name))},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"
