"""The ranks of one node as children of torch's elastic agent, which starts each in a session of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.store import join_timeout_s
from nxdt_core.launch.command import interpreter_words
from nxdt_core.launch.node import Node
from nxdt_core.torch_versions import run_agent

__all__ = ["run_ranks"]

_AGENT_SIGNALS = "SIGHUP,SIGQUIT"
"""What the agent passes on by itself. SIGINT and SIGTERM are the launcher's: the agent would send them once more to
ranks that a scheduler has signalled already, and a second one means to stop at once."""


def run_ranks(config: ResolvedConfig, node: Node, port: int, command: Sequence[str]) -> Mapping[int, int]:
    """Run the same command on each rank of this node until all have ended.

    Args:
        config: what the command is about.
        node: this one.
        port: of the store at which nodes and ranks meet.
        command: its verb and options.

    Returns:
        Exit code by rank, of those that failed or were stopped because others had; negative for signals.
    """
    # Its accounts of failures, as warnings and errors in a format of its own, would come before ours.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // node.devices)))
    settings = {
        "min_nodes": node.count,
        "max_nodes": node.count,
        "nproc_per_node": node.devices,
        "run_id": "nxdt",
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{node.address}:{port}",
        "rdzv_configs": {"rank": node.number, "timeout": join_timeout_s()},
        "max_restarts": 0,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),
    }
    try:
        words = [word.replace("$", "$$") for word in interpreter_words(config, command)]  # the agent fills in templates
        run_agent(settings, [sys.executable, *words], signals=_AGENT_SIGNALS)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _cores() -> int:
    """Cores that this process may use. (Ranks that each start a thread a core are slower than one process.)"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
