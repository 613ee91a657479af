"""A process that mounts file systems which no other process sees, as full and read-only disks of a test."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests import processes

__all__ = ["run"]

_NOT_ALLOWED = 77
_PRELUDE = f"""
import ctypes, errno, os, subprocess, sys
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACE, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 0x40000
if _libc.unshare(_NEW_NAMESPACE) or _libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None):
    sys.exit({_NOT_ALLOWED})

def mount(*words):
    if subprocess.run(["mount", *words]).returncode:
        sys.exit({_NOT_ALLOWED})
"""


def run(program: str, *arguments: str, **more: Any) -> Any:
    """Run a text as ``python -c``, with :func:`mount` and the arguments in ``sys.argv``; return the completed process.

    Skips the test where the machine allows no mounts of its own.
    """

    words: Sequence[str] = [sys.executable, "-c", _PRELUDE + program, *arguments]
    done = processes.run(words, capture_output=True, text=True, timeout=200, **more)
    if done.returncode == _NOT_ALLOWED:
        pytest.skip(f"no file system can be mounted for one process here: {done.stderr.strip()}")
    return done
