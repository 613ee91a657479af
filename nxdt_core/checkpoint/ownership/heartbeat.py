"""A thread that does a small thing again and again, as a sign of life. Torch-free."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from nxdt_core.checkpoint.os_errors import reason_of
from nxdt_core.errors.checkpoints import StorageError

__all__ = ["Heartbeat"]

_log = logging.getLogger(__name__)


@final
class Heartbeat:
    """Calls ``beat`` every ``every_s`` seconds until it is stopped or the process ends; a fork does not inherit it."""

    def __init__(self, beat: Callable[[], None], *, every_s: float, what: str) -> None:
        self._beat = beat
        self._every_s = every_s
        self._what = what
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a beat under way, and do no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        failing = False
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except (OSError, StorageError) as error:
                if not failing:
                    _log.warning("the heartbeat of %s fails, and will be tried again: %s", self._what, reason_of(error))
                failing = True
            else:
                failing = False
