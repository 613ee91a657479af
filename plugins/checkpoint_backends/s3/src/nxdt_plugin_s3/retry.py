"""Retries of requests with jitter, and with one deadline for everything that belongs to one save.

Why not the SDK's own retries: they know neither a deadline nor each other, so that a store that fails for every object
delays a save by (objects × attempts); and they draw from Python's global random generator, whose state a training run
saves and restores.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar, final

from botocore.exceptions import EndpointConnectionError

from nxdt_plugin_s3.faults import FAILURES, is_transient, redacted

__all__ = ["Retrier", "RetryBudget"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BASE_S, _LONGEST_S = 0.1, 10.0
_FIRST_CONTACT_S = 15.0
"""A host that never answered is more likely misspelt than down; a person waits for that message."""


@dataclass(slots=True)
class _Failures:
    """What failures have cost one save."""

    lost_s: float = 0.0
    failing: int = 0
    """Requests that are being tried again at the moment."""
    since: float = 0.0
    """When the first of these began to fail; where none is failing, when the last one ended."""


@final
class RetryBudget:
    """How much of its deadline a group of requests has spent on failures, counted once where several fail together.

    A group whose requests have all succeeded for as long as the deadline gets its whole budget back.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._failures: defaultdict[str, _Failures] = defaultdict(_Failures)
        self._lock = threading.Lock()

    def begin(self, group: str, since: float) -> bool:
        """Record that a request of ``group``, sent at ``since``, has failed for the first time; True where it is the
        only one."""
        with self._lock:
            failures = self._failures[group]
            if not failures.failing:
                if since - failures.since > self._deadline_s:
                    failures.lost_s = 0.0
                failures.since = since
            failures.failing += 1
            return failures.failing == 1

    def end(self, group: str) -> None:
        """It has succeeded, or was given up."""
        with self._lock:
            failures = self._failures[group]
            failures.failing -= 1
            if not failures.failing:
                now = time.monotonic()
                failures.lost_s += now - failures.since
                failures.since = now

    def left_s(self, group: str) -> float:
        """Return what is left of the deadline while a request of ``group`` is failing."""
        with self._lock:
            failures = self._failures[group]
            return self._deadline_s - failures.lost_s - (time.monotonic() - failures.since)


@final
class Retrier:
    """Retries requests.

    Args:
        max_attempts: attempts per request.
        deadline_s: deadline of one group of requests. A group is the objects below one directory of the root. Such a
            directory is one step, so a group is one save, or the reading of one checkpoint.
    """

    def __init__(self, max_attempts: int, deadline_s: float) -> None:
        self._max_attempts = max_attempts
        self._deadline_s = deadline_s
        self._budget = RetryBudget(deadline_s)
        self._random = random.Random()  # separate: all ranks seed the global one identically, for training
        self._reached = False

    def run(
        self,
        request: Callable[[], T],
        *,
        group: str,
        where: str,
        stop: threading.Event | None = None,
        max_attempts: int | None = None,
    ) -> T:
        """Return the result of ``request``, retried until it succeeds, cannot succeed, or the deadline has passed.

        Args:
            request: may be called several times.
            group: whose deadline counts.
            where: for the log.
            stop: once set, nothing is tried again.
            max_attempts: instead of the configured number.

        Raises:
            Exception: what the last attempt raised, one of :data:`nxdt_plugin_s3.faults.FAILURES`.
        """
        attempts, stop, failing = max_attempts or self._max_attempts, stop or threading.Event(), False
        try:
            for attempt in count(1):
                began = time.monotonic()
                try:
                    result = request()
                except FAILURES as error:
                    if not is_transient(error) or attempt >= attempts or stop.is_set():
                        raise
                    if not failing:
                        failing = True
                        self._log_retry(error, where, first=self._budget.begin(group, began))
                    left_s = self._left_s(error, group)
                    if left_s <= 0 or stop.wait(min(left_s, self._delay_s(attempt))):
                        raise
                else:
                    self._reached = True
                    return result
        finally:
            if failing:
                self._budget.end(group)
        raise AssertionError("unreachable: counting has no end")

    def _left_s(self, error: Exception, group: str) -> float:
        left_s = self._budget.left_s(group)
        if isinstance(error, EndpointConnectionError) and not self._reached:
            return min(left_s, left_s - self._deadline_s + _FIRST_CONTACT_S)
        return left_s

    def _delay_s(self, attempt: int) -> float:
        """Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/"""
        return self._random.uniform(0, min(_LONGEST_S, _BASE_S * 2.0**attempt))

    def _log_retry(self, error: Exception, where: str, *, first: bool) -> None:
        """Warn once for a spell of trouble, so that a wait has a reason; the rest is for who looks closely."""
        level = logging.WARNING if first else logging.DEBUG
        _log.log(level, "%s: %s; trying again for up to %.0f s", where, redacted(error), self._deadline_s)
