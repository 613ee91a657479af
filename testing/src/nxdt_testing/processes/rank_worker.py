"""Code that runs inside one process of a :class:`nxdt_testing.ranks.RankPool`; the parent's side is there."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

__all__ = ["STACK_SIGNAL", "Outcome", "Task", "import_module", "serve"]

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads to its log, also where it is stuck in C code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of a function on one rank. The arguments travel pickled, since their classes may live in the
    function's file, which is imported first."""

    module: str
    file: str
    qualname: str
    arguments: bytes
    environment: Mapping[str, str]
    directory: str
    path: Sequence[str]
    """Directories in which modules are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result or the error of one rank."""

    value: Any = None
    error: str | None = None
    """Traceback of what was raised."""
    at_s: float = 0.0
    """``time.monotonic`` at the end, comparable between the processes of one machine."""


def serve(connection: Connection, log: Path) -> NoReturn:
    """Run tasks and send the :class:`Outcome` of each, until the parent hangs up.

    (Rank 0 often hosts the store of the others: it must not go before they are done.)

    Args:
        connection: to the parent.
        log: takes the process's standard output and error.
    """
    gc.freeze()  # what the server has imported, a million objects: half a second of each full collection
    gc.set_threshold(10_000, 10, 10)  # a tenth of the CPU time of ranks that train tiny models
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # New objects: those of before may have been replaced or closed by a test runner.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)
    usual = dict(os.environ)
    with suppress(EOFError):
        while True:
            task: Task = connection.recv()
            os.chdir(task.directory)
            sys.path[:] = task.path
            os.environ.update(task.environment)
            torch.set_num_threads(int(task.environment["OMP_NUM_THREADS"]))
            connection.send_bytes(_outcome(task))
            os.environ.clear()
            os.environ.update(usual)
    os._exit(0)  # what the function left running, such as threads of a process group, may not delay the end


def _outcome(task: Task) -> bytes:
    try:
        function: Any = import_module(task.module, task.file)
        for name in task.qualname.split("."):
            function = getattr(function, name)
        arguments = pickle.loads(task.arguments)
        return pickle.dumps(Outcome(value=function(*arguments), at_s=time.monotonic()))
    except BaseException:  # a worker reports SystemExit and KeyboardInterrupt, too
        return pickle.dumps(Outcome(error=traceback.format_exc(), at_s=time.monotonic()))


def import_module(name: str, file: str) -> ModuleType:
    """Import ``name``, or the file under that name where it cannot be found: a test's file is in no package. Another
    file of that name may have been imported for an earlier task."""
    if name in sys.modules and file in ("", getattr(sys.modules[name], "__file__", "")):
        return sys.modules[name]
    sys.modules.pop(name, None)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _end_with_parent() -> None:
    """Collectives wait outside of the interpreter's lock, so this thread runs while they hang."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
