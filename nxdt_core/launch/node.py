"""Which of a run's nodes this is, where its ranks are started by ``nxdt train`` itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from nxdt_core.distributed.variables import read_port, read_variable
from nxdt_core.errors.ranks import BadLaunchVariable, NodePlaceMissing
from nxdt_core.protocols.launcher import Place

__all__ = ["Node", "node_from_environment"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or one share of a machine, of a run."""

    number: int
    count: int
    devices: int
    """Ranks of each node."""
    address: str
    """Of node 0."""
    port: int
    """Where the nodes meet; 0 lets the only node choose a free one."""

    def place(self) -> Place:
        """Return the launcher's place at the meeting point: node 0 serves it."""
        return Place(
            rank=self.number,
            world_size=self.count,
            host=socket.gethostname(),
            master_addr=self.address,
            master_port=self.port,
        )


def node_from_environment(devices: int, num_nodes: int, environment: Mapping[str, str] | None = None) -> Node:
    """Read ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, which several nodes need and a single one does not.

    Raises:
        NodePlaceMissing: there are several nodes, and a variable is not set.
        BadLaunchVariable: a variable holds something else than it should.
    """
    variables = os.environ if environment is None else environment
    if num_nodes == 1:
        port = read_port(variables, "MASTER_PORT") if variables.get("MASTER_PORT") else 0
        return Node(number=0, count=1, devices=devices, address=_LOOPBACK, port=port)
    missing = tuple(name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name))
    if missing:
        raise NodePlaceMissing(num_nodes=num_nodes, missing=missing)
    number = read_variable(variables, "NODE_RANK")
    if number >= num_nodes:
        raise BadLaunchVariable(
            name="NODE_RANK", value=str(number), wanted=f"below trainer.num_nodes, which is {num_nodes}"
        )
    return Node(
        number=number,
        count=num_nodes,
        devices=devices,
        address=variables["MASTER_ADDR"],
        port=read_port(variables, "MASTER_PORT"),
    )
