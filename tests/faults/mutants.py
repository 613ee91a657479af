"""Wrong ways to save, which the tests of faults must notice; applied in the processes that save, for good."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

from nxdt_core.checkpoint import prune
from nxdt_core.checkpoint.write import save
from tests.checkpoint.faults import FaultyStorage

__all__ = ["MUTANTS"]

Arguments = dict[str, Any]
"""Of the manager."""


def _prune_before_the_commit(arguments: Arguments) -> Arguments:
    return {**arguments, "before_commit": lambda: prune(arguments["storage"].inner, 1, deep=False)}


def _wait_for_ever(arguments: Arguments) -> Arguments:
    return {**arguments, "deadline_s": 1e6}


def _leave_files(arguments: Arguments) -> Arguments:
    save.withdraw = save.clear_other_attempts = lambda *_: None
    return arguments


def _trust_the_store(arguments: Arguments) -> Arguments:
    save._check_visible = lambda *_: None
    return arguments


def _ignore_what_a_rank_could_not_write(arguments: Arguments) -> Arguments:
    write = FaultyStorage.open_write

    @contextmanager
    def open_write(self: FaultyStorage, key: str) -> Iterator[BinaryIO]:
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(write(self, key))
            except OSError:
                stream = io.BytesIO()
            try:
                yield stream
                stack.close()
            except OSError:
                return

    FaultyStorage.open_write = open_write  # type: ignore[method-assign]
    return _trust_the_store(arguments)


MUTANTS: dict[str, Callable[[Arguments], Arguments]] = {
    "none": lambda arguments: arguments,
    "prune before the commit": _prune_before_the_commit,
    "wait for ever": _wait_for_ever,
    "leave files": _leave_files,
    "trust the store": _trust_the_store,
    "ignore what a rank could not write": _ignore_what_a_rank_could_not_write,
}
