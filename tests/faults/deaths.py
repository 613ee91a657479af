"""Ranks that are killed: what each rank of a job does that takes over from one that died, and dies in turn."""

from __future__ import annotations

from tests.faults.injection import Injection
from tests.faults.job import Job, joined
from tests.faults.judgement import after_fault, after_next_save
from tests.faults.place import Place
from tests.faults.victim import victim_of

__all__ = ["live_and_die"]


def live_and_die(place: Place, way: str, background: bool, step: int, injection: Injection | None) -> None:
    """Take the store over from a job that died while it saved ``step``, save that, and die while saving the next one.

    Raises what it found wrong. With no ``injection`` the job ends well.
    """
    ranks, victim, clean = joined(), victim_of(place, way), place.open()
    if ranks.rank == 0 and step > 2:
        wrong = after_fault(clean, before=[step - 2, step - 1], step=step, error=Exception("killed"))
        assert not wrong, f"after the death: {wrong}"
    job = Job(ranks, victim.storage, elements=place.elements, background=background)
    assert job.newest in (None, step - 1, step), f"it goes on from step {job.newest}"
    for each in (1, 2) if step == 2 else (step,):
        error = job.save(each)
        assert error is None, f"the next save of step {each} met {error!r}"
    if ranks.rank == 0:
        wrong = after_next_save(place, clean, steps=[step - 1, step], world=ranks.world_size)
        assert not wrong, f"after the next save: {wrong}"
    ranks.barrier()
    if injection is None:
        job.end()
        return
    if injection.rank == ranks.rank:
        victim.strike(injection)
    error = job.save(step + 1)
    assert injection.rank != ranks.rank, f"it never came in {victim.seen()}"
    assert error is not None, "nobody told that a rank is gone"
