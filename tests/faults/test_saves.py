"""A save that meets a fault, at every call of its store and at every request, on every rank: nothing is lost.

``make test-faults`` injects every fault, ``make test`` a sample (``--samples``, tests/sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
from nxdt_testing.ranks import RankPool, RanksFailed

from tests.faults import deaths, survivals
from tests.faults.injection import CALL_DEATHS, CALLS, REQUEST_DEATHS, REQUESTS, Call, Injection, Request
from tests.faults.place import Place
from tests.sampling import sampled

CASES = [
    pytest.param(store, way, world, background, id=f"{store}-{way}-{world}-{'background' if background else 'waiting'}")
    for (store, way), world, background in product(
        [("local", "calls"), ("s3", "calls"), ("s3", "requests")], (1, 2), (False, True)
    )
]
IN_A_ROW = 40
"""Faults that the same processes meet, one after the other."""
SAMPLE, SURVIVALS, DEATHS = 2, 4, 1
"""Of a sample: cases of each test, and faults in each case."""
DEFAULT = {"test_a_job_goes_on_from_one_that_was_killed": ["local-calls-2-background", "s3-requests-1-waiting"]}
"""Each store and each number of ranks once."""
TIMEOUT_S = 1800.0
"""Of forty faults in a row: those that last for ever end with the deadline of a store, more than ten seconds each."""

NewPlace = Callable[..., Place]
Kinds = Mapping[str, Call] | Mapping[str, Request]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    default = [case for case in CASES if case.id in DEFAULT.get(name, ())]
    cases = sampled(metafunc.config, CASES, SAMPLE, of=name, default=default)
    metafunc.parametrize(("store", "way", "world", "background"), cases)


def chances(place: Place, way: str, world: int, background: bool, kinds: Kinds) -> list[Injection]:
    """Each kind of fault, on each rank, at each call or request of a save."""
    seen = RankPool(world).run(survivals.list_chances, place, way, background, environment=place.environment)
    return [
        Injection(name, rank, number)
        for name, kind in kinds.items()
        for rank in range(world)
        for number, call in enumerate(seen[rank])
        if not (isinstance(kind, Call) and kind.writes) or call.startswith("write")
    ]


def outlived(place: Place, way: str, background: bool, step: int, world: int, injection: Injection | None) -> str:
    """Let a job live, and die by ``injection``; returns what was wrong, but for the death."""
    try:
        RankPool(world).run(deaths.live_and_die, place, way, background, step, injection, environment=place.environment)
    except RanksFailed as failed:
        dead = -1 if injection is None else injection.rank
        others = {rank: account for rank, account in failed.accounts.items() if rank != dead}
        if others or not failed.accounts.get(dead, "").startswith("died with exit code -9"):
            return f"{injection}: {failed}"
        return ""
    return "" if injection is None else f"{injection}: no rank died"


@pytest.mark.timeout(7200)
def test_ranks_that_survive_a_fault_lose_nothing(
    store: str, way: str, world: int, background: bool, new_place: NewPlace, some: Any, injected: Any
) -> None:
    in_parts, kinds = way == "requests", CALLS if way == "calls" else REQUESTS
    every = chances(new_place(store, in_parts=in_parts), way, world, background, kinds)
    chosen = some(every, SURVIVALS)
    wrong: list[str] = []
    for start in range(0, len(chosen), IN_A_ROW):
        place, row = new_place(store, in_parts=in_parts), chosen[start : start + IN_A_ROW]
        pool = RankPool(world)
        found = pool.run(
            survivals.meet_faults, place, way, background, row, environment=place.environment, timeout_s=TIMEOUT_S
        )
        wrong += found[0]
    injected(f"of {way} on {store}", len(chosen))
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(7200)
def test_a_job_goes_on_from_one_that_was_killed(
    store: str, way: str, world: int, background: bool, new_place: NewPlace, some: Any, injected: Any
) -> None:
    in_parts, kinds = way == "requests", CALL_DEATHS if way == "calls" else REQUEST_DEATHS
    every = chances(new_place(store, in_parts=in_parts), way, world, background, kinds)
    chosen = some(every, DEATHS)
    place = new_place(store, in_parts=in_parts)
    found = [
        outlived(place, way, background, step, world, injection)
        for step, injection in enumerate([*chosen, None], start=2)
    ]
    injected(f"deaths of {way} on {store}", len(chosen))
    assert not any(found), "\n".join(filter(None, found))
