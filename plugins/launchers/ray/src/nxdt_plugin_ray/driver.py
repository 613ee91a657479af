"""Writes a driver for Ray, which runs a job on a cluster: an actor per node in a placement group, all started again
after a loss."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.launch import JobFileUnwritable
from nxdt_core.protocols.launcher import Job, Launcher, Submission
from nxdt_core.system.parent import PARENT_VARIABLE
from nxdt_core.system.regular_files import make_directory, open_regular, regular_opener
from nxdt_plugin_ray.config import RayOptions
from nxdt_plugin_ray.errors import NoPlaceOnCluster, RayMissing

_MISTAKE = 2
"""Exit status of a run that a restart would repeat."""
_PLACE_S = 300.0
_STOP_S = 60.0
_LOST, _STOPPED = 1, 143


_DRIVER = '''\
"""Written by nxdt: {command_line}"""

import json
import sys

from nxdt_plugin_ray.driver import Work, main

WORK = json.loads({work!r})

if __name__ == "__main__":
    sys.exit(main(Work(**WORK)))
'''


class RayLauncher(Launcher):
    """Nodes as actors of Ray. Each calls ``nxdt train``, which starts the processes of its devices."""

    def submission(self, job: Job, options: RayOptions) -> Submission:
        """Return a driver."""
        commands = [list(words) for words in (job.compile, job.train) if words]
        bundle = {"CPU": options.cpus_per_node, "GPU": options.gpus_per_node, **options.resources}
        work = {
            "name": job.name,
            "commands": commands,
            "nodes": job.nodes,
            "address": options.address,
            "bundle": {name: amount for name, amount in bundle.items() if amount},
            "strategy": options.strategy,
            "environment": dict(options.environment),
            "directory": str(job.working_directory),
            "logs": str(job.directory / "logs"),
            "max_restarts": options.max_restarts,
        }
        text = _DRIVER.format(command_line=job.command_line, work=json.dumps(work))
        return Submission(files={"job.py": text}, command=(sys.executable, "job.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job, as the driver has it."""

    name: str
    commands: Sequence[Sequence[str]]
    """Arguments of ``nxdt``, carried out one after the other."""
    nodes: int
    address: str
    bundle: Mapping[str, float]
    """Resources of Ray that each node reserves."""
    strategy: str
    environment: Mapping[str, str]
    directory: str
    logs: str
    max_restarts: int


class Node:
    """An actor: one node of the run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        import ray

        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def carry_out(self, work: Work, number: int, address: str, port: int) -> int:
        """Run the commands as node ``number``; return the first exit status that is not 0."""
        place = {"NODE_RANK": str(number), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        environment = {**os.environ, **work.environment, **place, PARENT_VARIABLE: str(os.getpid())}
        with open(_log(work, number), "ab", opener=regular_opener) as log:
            for words in work.commands:
                command = [sys.executable, "-m", "nxdt_plugin_ray.child", *words]
                self._process = subprocess.Popen(
                    command,
                    cwd=work.directory,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                status = self._process.wait()
                if status != 0:
                    return status if status > 0 else 128 - status
        return 0

    def end(self) -> None:
        """Ask what runs to save and stop, and kill it where it does not."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main(work: Work) -> int:
    """Carry out a job and return its exit status; an error is printed without a traceback."""
    try:
        return run(work)
    except NxdtError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return _STOPPED


def run(work: Work) -> int:
    """Carry out a job and return its exit status.

    Raises:
        RayMissing: Ray is not installed.
        NoPlaceOnCluster: the cluster does not have what the nodes reserve.
        JobFileUnwritable: the log of a node cannot be written.
    """
    try:
        import ray
    except ImportError as error:
        raise RayMissing(reason=str(error)) from error
    for path in (_log(work, number) for number in range(work.nodes)):
        try:  # a node that cannot open its own is lost without a reason
            make_directory(path.parent)
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            raise JobFileUnwritable(path=str(path), reason=error.strerror or str(error)) from error
    if work.address == "local":
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=work.address, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = _LOST
    try:
        for attempt in range(work.max_restarts + 1):
            if attempt:
                print(
                    f"status {status}: restart {attempt} of {work.max_restarts} from the newest checkpoint", flush=True
                )
            status = _attempt(ray, work)
            if status in (0, _MISTAKE):
                break
    finally:
        ray.shutdown()
    return status


def _log(work: Work, number: int) -> Path:
    return Path(work.logs) / f"node-{number}.log"


def _attempt(ray: Any, work: Work) -> int:
    """Start the nodes, and end all of them with the first that fails."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(work.bundle)] * work.nodes, strategy=work.strategy)
    try:
        if not group.wait(_PLACE_S):
            raise NoPlaceOnCluster(
                timeout_s=_PLACE_S, nodes=work.nodes, bundle=str(dict(work.bundle)), found=str(ray.cluster_resources())
            )
        actor = ray.remote(Node)
        nodes = [
            actor.options(
                num_cpus=0,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            for number in range(work.nodes)
        ]
        address, port = ray.get(nodes[0].meeting_point.remote())
        waiting = [node.carry_out.remote(work, number, address, port) for number, node in enumerate(nodes)]
        status = 0
        while waiting and status == 0:
            (done, *_), waiting = ray.wait(waiting)
            try:
                status = ray.get(done)
            except ray.exceptions.RayError:  # the actor or its node is gone
                status = _LOST
        # The others end by themselves, since a rank that dies ends the run; or they wait for a node that never came.
        if waiting and len(ray.wait(waiting, num_returns=len(waiting), timeout=_STOP_S)[1]) > 0:
            ended = [node.end.remote() for node in nodes]
            ray.wait(ended, num_returns=len(ended), timeout=2 * _STOP_S)
        return status
    finally:
        remove_placement_group(group)
