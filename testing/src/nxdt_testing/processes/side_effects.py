"""Side effects of code under test (writes, starts, imports), by the interpreter's audit events and in new processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["assert_light", "in_new_process", "side_effects"]

_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_WRITES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_HEAVY = ("torch", "pytorch_lightning", "lightning", "transformers", "numpy")
_PROBE = """
import sys
from importlib import import_module
for name in sys.argv[2:]:
    import_module(name)
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""
_lists: list[list[str]] = []
"""Lists that one audit hook fills; there is one hook, since none can be removed."""
_installed: list[bool] = []


@contextmanager
def side_effects() -> Iterator[Sequence[str]]:
    """Collect what the body writes and starts, a phrase such as ``writes job.sh`` for each.

    Example::

        with side_effects() as found:
            launcher.submission(job, options)
        assert not found
    """
    if not _installed:
        sys.addaudithook(_note)
        _installed.append(True)
    effects: list[str] = []
    _lists.append(effects)
    try:
        yield effects
    finally:
        _lists.remove(effects)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not _lists:
        return
    phrase = ""
    if event in _STARTS:
        phrase = f"starts {arguments[0] if arguments else 'a process'}"
    elif event in _WRITES:
        phrase = f"writes {arguments[0]}"
    elif event == "open":
        path, _, flags = arguments
        cached = "__pycache__" in str(path)  # bytecode that Python keeps of imported modules does not count
        phrase = f"writes {path}" if not cached and flags & (os.O_WRONLY | os.O_RDWR) else ""
    if phrase:
        for effects in _lists:
            effects.append(phrase)


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    """Return what Python prints that runs ``code`` with this process's ``sys.path``.

    Raises:
        RuntimeError: it failed; with its standard error.
    """
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


@cache
def _heavy_imports(*modules: str) -> list[str]:
    return in_new_process(_PROBE, ",".join(_HEAVY), *modules).split()


def assert_light(*modules: str) -> None:
    """Assert that importing ``modules``, one after the other in a new process, imports no heavy library."""
    heavy = _heavy_imports(*modules)
    assert not heavy, f"importing {' and '.join(modules)} imports {', '.join(heavy)}"
