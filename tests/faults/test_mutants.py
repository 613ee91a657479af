"""The tests of faults notice wrong ways to save: otherwise their silence would say nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nxdt_testing.ranks import RankPool, RanksFailed

from tests.faults import survivals
from tests.faults.injection import Injection
from tests.faults.mutants import MUTANTS
from tests.faults.place import Place
from tests.sampling import slow_except

FAULTS = {
    "prune before the commit": ("EIO", 0, "put .*manifest", "is lost"),
    "leave files": ("disk full", 1, "open .*/optim/", "holds files of"),
    "trust the store": ("cut off in silence", 1, "write .*digests", "is not committed"),
    "ignore what a rank could not write": ("EIO", 1, "close .*/model/", "is not committed"),
}
"""By mutant: what happens on which rank at the first call of this kind, and what is said of it."""
HUNG_S = 6.0


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The calls of each of two ranks during a save."""
    place = Place(str(tmp_path_factory.mktemp("calls") / "place"))
    return RankPool(2).run(survivals.list_chances, place, "calls", True)


def meet(directory: Path, injections: list[Injection], mutant: str, timeout_s: float = 60.0) -> str:
    arguments = (Place(str(directory)), "calls", True, injections, mutant)
    return "\n".join(RankPool(2).run(survivals.meet_faults, *arguments, timeout_s=timeout_s)[0])


def chosen(calls: list[list[str]], mutant: str) -> Injection:
    kind, rank, call, _ = FAULTS[mutant]
    return Injection(kind, rank, next(number for number, each in enumerate(calls[rank]) if re.match(call, each)))


def test_every_mutant_is_tried():
    assert MUTANTS.keys() == FAULTS.keys() | {"none", "wait for ever"}


DEFAULT = ("prune before the commit", "ignore what a rank could not write")
"""Of the two ways to notice one each: what is kept, and what the save told; they lose data silently."""


@pytest.mark.parametrize("mutant", slow_except(FAULTS, DEFAULT))
def test_a_wrong_save_is_noticed_by_one_fault(mutant, tmp_path, calls):
    assert FAULTS[mutant][-1] in meet(tmp_path, [chosen(calls, mutant)], mutant)


def test_the_right_one_passes_the_same_faults(tmp_path, calls):
    assert meet(tmp_path, [chosen(calls, mutant) for mutant in FAULTS], "none") == ""


@pytest.mark.slow
def test_a_save_without_a_deadline_is_noticed(tmp_path):
    """By its ranks, which never come back."""
    with pytest.raises(RanksFailed, match="not done within"):
        meet(tmp_path, [Injection("hang", 1, 5)], "wait for ever", HUNG_S)
