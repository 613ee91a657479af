"""Who writes what in a save, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from nxdt_core.checkpoint.collective import on_all_ranks, rank_of
from nxdt_core.checkpoint.write.assignment import assign
from nxdt_core.protocols.parallel.piece import Listing, Place
from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["Planner", "SavePlan", "agree_on_plan"]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The share of each rank."""

    listings: Sequence[Listing]
    """What each rank holds."""
    mine: AbstractSet[Place]
    """Tensors whose box this rank writes."""


def agree_on_plan(ranks: RankAgreement | None, prepare: Callable[[], Listing], *, where: str) -> SavePlan:
    """Gather what all ranks hold and share the writing. Collective: what ``prepare`` raises on one is raised on all."""
    listings = on_all_ranks(ranks, prepare, where=where)
    return SavePlan(listings, assign(listings)[rank_of(ranks)])


class Planner:
    """Plans consecutive saves. While the listings of all ranks are unchanged, the ranks exchange only that fact."""

    def __init__(self, ranks: RankAgreement | None) -> None:
        self._ranks = ranks
        self._plan: SavePlan | None = None

    def plan(self, prepare: Callable[[], Listing], *, where: str) -> SavePlan:
        """Return the plan of :func:`agree_on_plan`, made once."""
        if self._plan is None:
            self._plan = agree_on_plan(self._ranks, prepare, where=where)
            return self._plan
        known = self._plan.listings[rank_of(self._ranks)]
        found: list[Listing] = []

        def is_known() -> bool:
            found.append(prepare())
            return found[0] == known

        if not all(on_all_ranks(self._ranks, is_known, where=where)):
            self._plan = agree_on_plan(self._ranks, lambda: found[0], where=where)
        return self._plan
