"""Several calls in the same ranks, one after the other: processes are started once for each number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from nxdt_testing.ranks import RankPool

__all__ = ["Call", "in_turn", "run_in_turn"]

Name = TypeVar("Name")


@dataclass(frozen=True)
class Call:
    """A call on the first ``world`` ranks: on all ranks of a pool, or on one."""

    world: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def in_turn(calls: Sequence[Call]) -> list[Any]:
    """Make calls one after the other in this process; returns the result of each, None where this rank has no part."""
    results = []
    for call in calls:
        if int(os.environ["RANK"]) >= call.world:
            results.append(None)
            continue
        with mock.patch.dict(os.environ, WORLD_SIZE=str(call.world), LOCAL_WORLD_SIZE=str(call.world)):
            results.append(call.function(*call.arguments))
    return results


def run_in_turn(calls: Mapping[Name, Call], **options: Any) -> dict[Name, list[Any]]:
    """Make calls in as few processes as possible, since starting one costs more than a call.

    Args:
        calls: by name. Those on one rank are made in the smallest pool of the others.
        options: of :meth:`RankPool.run`, for the calls of each pool.

    Returns:
        By name, what each rank returned.
    """
    small = min((call.world for call in calls.values() if call.world > 1), default=1)
    found: dict[Name, list[Any]] = {}
    for world in sorted({max(call.world, small) for call in calls.values()}):
        names = [name for name, call in calls.items() if max(call.world, small) == world]
        reports = RankPool(world, lasting=True).run(
            in_turn, [calls[name] for name in names], **{"timeout_s": 120, **options}
        )
        for place, name in enumerate(names):
            found[name] = [report[place] for report in reports[: calls[name].world]]
    return found
