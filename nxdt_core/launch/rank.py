"""A rank's run: joined to the others before anything else, so that a failure is reported once, by one of them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from nxdt_core.config.show import hide_secrets
from nxdt_core.distributed.process_group import connect_store, join_timeout_s
from nxdt_core.errors import NxdtError
from nxdt_core.errors.ranks import CannotReachRankZero
from nxdt_core.kernel.discovery import exits_explained, note_plugin
from nxdt_core.launch.supervision.client import Client, find_supervisor, is_published, open_supervisor
from nxdt_core.launch.supervision.root_cause import INTERRUPTION, RootCause
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.system.parent import outlive_parent
from nxdt_core.system.progress import PROGRESS, process_age_s
from nxdt_core.system.visible_text import visible


def as_rank(place: RankEnvironment, run: Callable[[Client], int]) -> int:
    """Call ``run`` as one of many ranks and return the process's exit status.

    Does not return where a rank fails: all processes end then, with the status of that failure.

    Raises:
        NxdtError: the ranks do not find each other.
    """

    def report(root_cause: RootCause) -> None:
        print(visible(root_cause.text), file=sys.stderr, flush=True)

    place.export()
    store = connect_store(place)
    if place.rank == 0 and not is_published(store, place):
        open_supervisor(store, place, world_size=place.world_size, in_rank_zero=True, on_root_cause=report)
    try:
        supervisor = find_supervisor(store, place)
        client = Client(place, supervisor)
    except OSError as error:
        raise CannotReachRankZero(
            who=f"rank {place.rank}",
            host=place.host,
            address=place.master_addr,
            port=place.master_port,
            timeout_s=join_timeout_s(),
            reason=error.strerror or str(error),
        ) from error
    client.store = store
    PROGRESS.spent("launch")
    if (supervisor.host, supervisor.pid) == (place.host, os.getppid()):  # the connection ends with the launcher
        outlive_parent()
        if PROGRESS.start:
            PROGRESS.start["launch"] += process_age_s(os.getppid()) - process_age_s()
    try:
        with exits_explained():
            status = run(client)
    except NxdtError as error:
        client.fail("mistake", hide_secrets(str(error)), error.exit_status)
    except KeyboardInterrupt:
        client.fail("interrupt", "", INTERRUPTION.status)
    except Exception as error:
        note_plugin(error)
        client.fail("bug", hide_secrets(traceback.format_exc()), 1)
    return client.done(status)
