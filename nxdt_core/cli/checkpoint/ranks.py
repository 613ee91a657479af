"""A verb that many processes can do together: under torchrun, Slurm, or another launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["on_all_ranks"]

_T = TypeVar("_T")


def on_all_ranks(work: Callable[[RankAgreement | None], _T], report: Callable[[_T], None]) -> int:
    """Call ``work`` as one of the processes that a launcher has started, or alone; rank 0 reports.

    Returns:
        The exit status. The failure of one rank ends all of them, and is reported once.
    """
    from nxdt_core.launch.joining import find_place

    place = find_place()
    if place.world_size == 1:
        report(work(None))
        return 0
    from nxdt_core.distributed.devices import HOST
    from nxdt_core.distributed.process_group import Ranks
    from nxdt_core.launch.rank import as_rank

    def run(client: Client) -> int:
        ranks = Ranks(place)
        ranks.start(HOST)
        result = work(ranks)
        if client.is_first:
            report(result)
        ranks.stop()
        return 0

    return as_rank(place, run)
