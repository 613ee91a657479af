"""The launcher of ``nxdt train`` and ``nxdt compile``, one per node: launchers meet, start ranks, and end with them.

The first node serves the store and the supervisor. Signals come to the launcher and pass through the supervisor, so
that a rank is asked to stop once, whether a terminal or a scheduler signalled one process or all of them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import configure_allocator, current_device, profile_of, register_profile_of
from nxdt_core.distributed.environment import read_port, read_variable
from nxdt_core.distributed.process_group import check_devices, connect_store, cores_of_process, join_timeout_s
from nxdt_core.distributed.torch_versions import run_agent
from nxdt_core.errors.launch import NodeAlreadyJoined
from nxdt_core.errors.ranks import BadLaunchVariable, NodePlaceMissing, RankDied, RanksMissing
from nxdt_core.launch.restarts import SIGNALS, handled_by, interpreter_arguments, is_restarted
from nxdt_core.launch.supervision.client import Client, find_supervisor, open_supervisor
from nxdt_core.launch.supervision.messages import Stop
from nxdt_core.launch.supervision.root_cause import INTERRUPTION
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.system.parent import PARENT_VARIABLE

_LOOPBACK = "127.0.0.1"
_AGENT_SIGNALS = "SIGHUP,SIGQUIT"
"""Signals that the agent itself forwards. The launcher handles SIGINT and SIGTERM: the agent would send them again to
ranks that a scheduler has already signalled, and a second signal stops a rank immediately."""
_RETRY_S = 1.0
_SAME_REQUEST_S = 1.0
_LAST_RANKS_S = 5.0
"""Seconds that ranks have to end after a run that failed elsewhere."""


def node_from_environment(num_nodes: int, environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """Return the place of this node's launcher among those of all nodes, where it meets them.

    It is read from ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, which several nodes need and a single one does
    not. Port 0 lets the only node choose a free one.

    Raises:
        NodePlaceMissing: there are several nodes, and a variable is not set.
        BadLaunchVariable: a variable holds something else than it should.
    """
    variables = os.environ if environment is None else environment
    host = socket.gethostname()
    if num_nodes == 1:
        port = read_port(variables, "MASTER_PORT") if variables.get("MASTER_PORT") else 0
        return RankEnvironment(host=host, master_addr=_LOOPBACK, master_port=port)
    missing = tuple(name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name))
    if missing:
        raise NodePlaceMissing(num_nodes=num_nodes, missing=missing)
    number = read_variable(variables, "NODE_RANK")
    if number >= num_nodes:
        raise BadLaunchVariable(
            name="NODE_RANK", value=str(number), wanted=f"below trainer.num_nodes, which is {num_nodes}"
        )
    return RankEnvironment(
        rank=number,
        world_size=num_nodes,
        host=host,
        master_addr=variables["MASTER_ADDR"],
        master_port=read_port(variables, "MASTER_PORT"),
    )


def run_ranks(
    config: ResolvedConfig, node: RankEnvironment, port: int, command: Sequence[str], received: list[int]
) -> Mapping[int, int]:
    """Run the same command, a verb with options, on each rank of this node until all have ended.

    Ranks meet at the store of ``port``. A signal that the agent passes on is added to those that this process received.

    Returns:
        Exit codes by rank, of ranks that failed or were stopped because others had failed; negative for signals.
    """
    # The agent would report failures before nxdt does, as warnings and errors in another format.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    devices = config.run.trainer.devices
    threads = str(max(1, len(cores_of_process()) // devices))
    of_ranks = {PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    settings = {
        "min_nodes": node.world_size,
        "max_nodes": node.world_size,
        "nproc_per_node": devices,
        "run_id": "nxdt",
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{node.master_addr}:{port}",
        "rdzv_configs": {"rank": node.rank, "timeout": join_timeout_s()},
        "max_restarts": 0,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),
    }
    before = {name: os.environ.get(name) for name in of_ranks}
    os.environ.update(of_ranks)
    try:
        # The agent fills in templates.
        words = [word.replace("$", "$$") for word in interpreter_arguments(config, command)]
        run_agent(settings, [sys.executable, *words], signals=_AGENT_SIGNALS)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        received.append(error.sigval)
        return {node.rank * devices: -error.sigval}
    finally:
        # What the caller starts afterwards is not a rank of this run: ``NXDT_PARENT`` would end it at once.
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return {}


def launch(config: ResolvedConfig, command: Sequence[str]) -> tuple[int, str]:
    """Start this node's ranks with the same arguments, and wait until those of all nodes have ended.

    Each rank runs ``command``, a verb with options, with the configuration's source and overrides.

    Returns:
        The exit status, and the text of a failure to print; empty where rank 0 has printed all.

    Raises:
        NotEnoughDevices: this node has fewer than it should have ranks.
        RankDied: a rank ended without a report.
        NxdtError: the nodes do not find each other.
    """
    trainer = config.run.trainer
    node = node_from_environment(trainer.num_nodes)
    register_profile_of(config)
    device = current_device(trainer.accelerator)
    check_devices(device, trainer.devices, node.host)
    configure_allocator(trainer, profile_of(device))
    store = _join(node)
    supervisor = None
    if node.rank == 0:
        supervisor = open_supervisor(store, node, world_size=node.world_size * trainer.devices, in_rank_zero=False)
    names = [f"nxdt/node/{number}" for number in range(node.world_size)]
    store.set(names[node.rank], "")
    try:
        store.wait(names, timedelta(seconds=join_timeout_s()))
    except DistError as error:
        missing = tuple(number for number, name in enumerate(names) if not store.check([name]))
        raise RanksMissing(unit="node", total=node.world_size, missing=missing, timeout_s=join_timeout_s()) from error
    if supervisor is not None:
        with _forwarded(lambda number, urgent: supervisor.stop(number, urgent=urgent)) as received:
            codes = run_ranks(config, node, store.port, command, received)
        root_cause = supervisor.wait_for_root_cause() if codes else supervisor.root_cause
        if root_cause is None and not codes:
            return supervisor.status, ""
        if root_cause is not None and root_cause.dead is None:
            return root_cause.status, root_cause.text
        dead = None if root_cause is None else root_cause.dead
        rank = _first_ended_rank(codes, None if dead is None else dead.rank)
        if received and codes.get(rank) in {-number for number in SIGNALS}:
            return 128 + received[0], INTERRUPTION.text
        host = dead.host if dead is not None and dead.rank == rank else node.host
        raise RankDied(rank=rank, host=host, how=_describe_exit(codes.get(rank)))

    client, ranks_ended = Client(node, find_supervisor(store, node), is_rank=False), threading.Event()

    def leave_with_run() -> None:
        """End this launcher some time after the run has failed. Ranks that were not connected then look for a
        supervisor that has ended, and end with this process."""
        client.ended.wait()
        status, cause = client.outcome()
        if cause is not None and not ranks_ended.wait(_LAST_RANKS_S):
            print(_ended_with_run(node, cause), file=sys.stderr, flush=True)
            os._exit(status)

    threading.Thread(target=leave_with_run, daemon=True).start()
    with _forwarded(lambda number, urgent: client.send(Stop(signal=number, urgent=urgent))) as received:
        codes = run_ranks(config, node, store.port, command, received)
    ranks_ended.set()
    status, cause = client.outcome()
    if cause is not None:
        return status, _ended_with_run(node, cause)
    if codes:
        rank = _first_ended_rank(codes, None)
        raise RankDied(rank=rank, host=node.host, how=_describe_exit(codes[rank]))
    return status, ""


def _join(node: RankEnvironment) -> TCPStore:
    """Connect to the store as this node. After a restart the store may still be that of the run without this node,
    which ends within seconds."""
    end = time.monotonic() + join_timeout_s()
    while True:
        store = connect_store(node, who=f"Node {node.rank}")
        if store.add(f"nxdt/node/{node.rank}/joined", 1) == 1:
            return store
        del store
        if time.monotonic() > end:
            raise NodeAlreadyJoined(number=node.rank, address=node.master_addr, port=node.master_port)
        time.sleep(_RETRY_S)


def _ended_with_run(node: RankEnvironment, cause: str) -> str:
    return f"Node {node.rank} ended with the run, since {cause}."


def _first_ended_rank(codes: Mapping[int, int], reported: int | None) -> int:
    """The rank that ended first, rather than one that the agent ended for that."""
    if reported is not None and codes.get(reported) != -signal.SIGTERM:
        return reported
    by_itself = [rank for rank, code in codes.items() if code != -signal.SIGTERM]
    return min(by_itself or codes)


def _describe_exit(code: int | None) -> str:
    """Return a description of a process's end, as far as this node knows it."""
    if code is None:
        return ""
    return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}"


@contextmanager
def _forwarded(stop: Callable[[int, bool], None]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the ranks; a second one is urgent. Yields those that came.

    Where another process restarts this one, two within a second are one request: a scheduler signals both, and the
    other passes its signal on.
    """
    same_request_s = _SAME_REQUEST_S if is_restarted() else 0.0
    received: list[int] = []
    came_at_s = 0.0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal came_at_s
        now = time.monotonic()
        if received and now - came_at_s < same_request_s:
            return
        came_at_s = now
        received.append(number)
        stop(number, len(received) > 1)

    with handled_by(pass_on):
        yield received
