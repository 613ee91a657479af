"""The ranks of one node as children of torch's elastic agent, which starts each in a separate session."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.process_group import cores_of_process
from nxdt_core.distributed.store import join_timeout_s
from nxdt_core.launch.command import interpreter_words
from nxdt_core.launch.node import Node
from nxdt_core.parent import PARENT_VARIABLE
from nxdt_core.torch_versions import run_agent

__all__ = ["run_ranks"]

_AGENT_SIGNALS = "SIGHUP,SIGQUIT"
"""Signals that the agent itself forwards. The launcher handles SIGINT and SIGTERM: the agent would send them again to
ranks that a scheduler has already signalled, and a second signal stops a rank immediately."""


def run_ranks(config: ResolvedConfig, node: Node, port: int, command: Sequence[str]) -> Mapping[int, int]:
    """Run the same command on each rank of this node until all have ended.

    Args:
        config: the configuration of the command.
        node: this node.
        port: port of the store at which nodes and ranks meet.
        command: verb and options of the command.

    Returns:
        Exit codes by rank, of ranks that failed or were stopped because others had failed; negative for signals.
    """
    # The agent would report failures before nxdt does, as warnings and errors in another format.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores_of_process()) // node.devices)))
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
