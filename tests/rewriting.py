"""Rewrites the assertions of test files, as pytest does on their import, before the workers of pytest-xdist do.

In a fresh clone each worker would rewrite nearly all of them, which takes 9 CPU-seconds. The process that starts the
workers has nothing else to do while the server of forks (:mod:`tests.fork_server`) makes its imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)

__all__ = ["rewrite_tests"]


def rewrite_tests(config: pytest.Config) -> None:
    """Write the compiled files of the tests below the directories that the command line or ``testpaths`` names."""
    state = config.stash[assertstate_key]
    for path in _files(config):
        compiled = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
        if _read_pyc(path, compiled) is None and try_makedirs(compiled.parent):
            source, code = _rewrite_test(path, config)
            _write_pyc(state, code, source, compiled)


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        directory = config.invocation_params.dir / argument
        if directory.is_dir():
            yield from (path for name in ("conftest.py", "test_*.py") for path in directory.rglob(name))
