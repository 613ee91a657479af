"""A plugin whose store kills a process of the run at a call that the environment names."""

from __future__ import annotations

import os
import signal
from typing import Any

from nxdt_core.api import StoreComponent, hookimpl
from tests.checkpoint.faults import FaultyStorage
from tests.faults.place import Place

__all__ = ["DEATH", "ENDPOINT", "PLACE", "DeadlyStorage", "opened"]

PLACE, ENDPOINT, DEATH = "FAULTS_PLACE", "FAULTS_ENDPOINT", "FAULTS_DEATH"
"""Variables: the place and its endpoint; rank and number of the deadly call, empty for none."""

opened: list[DeadlyStorage] = []
"""Those of this process."""


class DeadlyStorage(FaultyStorage):
    """The place of the environment, whatever the address is."""

    def __init__(self, uri: str, config: Any = None) -> None:
        rank, _, number = os.environ[DEATH].partition(" ")
        dies = number and rank == os.environ["RANK"]
        place = Place(os.environ[PLACE], os.environ[ENDPOINT])
        super().__init__(place.open(), int(number) if dies else None, error=_die)
        self.uri = uri
        opened.append(self)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare it."""
    target = "tests.faults.deadly:DeadlyStorage"
    return [StoreComponent(name="deadly", target=target, summary="Kills at a call.", uri_schemes=("deadly",))]
