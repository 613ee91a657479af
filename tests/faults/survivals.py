"""Faults that processes survive, one after the other, in ranks that live on: what each rank does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count

from nxdt_core.distributed.process_group import Ranks
from tests.error_names import name_of
from tests.faults.injection import CALLS, REQUESTS, Injection, let_go
from tests.faults.job import AMPLE_S, Job, joined
from tests.faults.judgement import after_fault, after_next_save
from tests.faults.mutants import MUTANTS
from tests.faults.place import Place
from tests.faults.victim import victim_of

__all__ = ["list_chances", "meet_faults"]

_SHORT_S = 1.0
"""Deadline of a save that a call holds up for ever."""


def list_chances(place: Place, way: str, background: bool) -> list[str]:
    """Save three times; returns the calls or requests of this rank during the third save, which prunes the first.

    Saves on where the owner gave a sign of life meanwhile: that comes by the clock, and another save has none.
    """
    ranks, victim = joined(), victim_of(place, way)
    job = Job(ranks, victim.storage, elements=place.elements, background=background)
    for step in count(1):
        ranks.barrier()
        victim.strike(None)
        error = job.save(step)
        assert error is None, f"{type(error).__name__}: {error}"
        seen = [*victim.seen()]
        beaten = ranks.all_gather_object(any(_is_beat(call) for call in seen))
        if step >= 3 and not any(beaten):
            break
    job.end()
    return seen


def _is_beat(call: str) -> bool:
    return ".beat" in call and not call.startswith(("read", "GET"))


def meet_faults(
    place: Place, way: str, background: bool, injections: Sequence[Injection], mutant: str = "none"
) -> list[str]:
    """Save step after step, each first with a fault and then again without; returns on rank 0 what went wrong.

    Every other time the job starts anew between the two, and takes the store over from itself.
    """
    ranks, victim, clean, change = joined(), victim_of(place, way), place.open(), MUTANTS[mutant]
    wrong: list[str] = []
    job = Job(ranks, victim.storage, elements=place.elements, background=background, mutant=change)
    for step in (1, 2):
        error = job.save(step)
        assert error is None, f"{type(error).__name__}: {error}"
    for number, injection in enumerate(injections):
        step, hangs = number + 3, injection.kind.startswith("hang")
        if hangs:
            job.end()
            job = Job(
                ranks,
                victim.storage,
                elements=place.elements,
                background=background,
                deadline_s=_SHORT_S,
                mutant=change,
            )
        ranks.barrier()
        victim.strike(injection if injection.rank == ranks.rank else None)
        error = job.save(step)
        found = _told(ranks, injection, error)
        struck = ranks.broadcast_object(victim.seen()[injection.number :][:1], source=injection.rank)
        victim.strike(None)
        if ranks.rank == 0:
            found += after_fault(clean, before=[step - 2, step - 1], step=step, error=error)
        if hangs or number % 2:
            job.end()
            job = Job(ranks, victim.storage, elements=place.elements, background=background, mutant=change)
        again = ranks.all_gather_object(repr(job.save(step)))
        found += [f"the save after it met {each}" for each in again if each != "None"]
        let_go.set()
        _join_late_saves()
        ranks.barrier()
        if ranks.rank == 0:
            found += after_next_save(place, clean, steps=[step - 1, step], world=ranks.world_size, late=hangs)
        wrong += [f"{injection} {struck}: {each}" for each in found]
    job.end()
    return wrong


def _told(ranks: Ranks, injection: Injection, error: Exception | None) -> list[str]:
    """All ranks are told, of that fault, or none is."""
    names = ranks.all_gather_object(name_of(error))
    allowed = {**CALLS, **REQUESTS}[injection.kind].told
    if set(names) == {"NoneType"} or allowed.issuperset(names):
        return []
    return [f"the ranks are told {names}"]


def _join_late_saves() -> None:
    """Wait for the threads of saves that were given up, once what they hung in has let them go."""
    for thread in threading.enumerate():
        if thread.name.startswith("save "):
            thread.join(AMPLE_S)
