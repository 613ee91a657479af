"""Errors of starting many ranks, of their agreement and of their end: codes ``NXDT-P004``, ``NXDT-P04…`` and
``NXDT-P08…``."""

from __future__ import annotations

from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "BadLaunchVariable",
    "CannotReachRankZero",
    "LaunchEnvironmentIncomplete",
    "NodePlaceMissing",
    "NotEnoughDevices",
    "OutOfMemory",
    "PortTaken",
    "RankDied",
    "RankHung",
    "RanksDisagree",
    "RanksMissing",
    "WorldSizeMismatch",
]


class LaunchEnvironmentIncomplete(NxdtError):
    """Some variables of a launcher are set and others are not."""

    code = "NXDT-P040"
    happened = "{reason} set in the environment, and {names} is missing."
    remedy = "Let the launcher set all of them, or unset those that another program left there."
    missing: tuple[str, ...]
    reason: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": ", ".join(self.missing)}


class BadLaunchVariable(NxdtError):
    """A launcher's variable that cannot be read."""

    code = "NXDT-P041"
    happened = "The environment variable {name} is {value!r}, which is not {wanted}."
    remedy = "Correct it where the processes are started, or unset it to run without that launcher."
    name: str
    value: str
    wanted: str


class WorldSizeMismatch(NxdtError):
    """Another number of processes was started than the configuration speaks of."""

    code = "NXDT-P042"
    happened = (
        "{launcher} started {processes}, and trainer.devices={devices} x trainer.num_nodes={num_nodes} "
        "asks for {wanted}."
    )
    remedy = "Start {wanted} (one per device), or set trainer.devices and trainer.num_nodes to what is started."
    launcher: str
    found: int
    devices: int
    num_nodes: int

    def _view(self) -> dict[str, Any]:
        processes = "1 process" if self.found == 1 else f"{self.found} processes"
        return {**super()._view(), "processes": processes, "wanted": self.devices * self.num_nodes}


class NodePlaceMissing(NxdtError):
    """A run over several nodes in which the number of this node is unknown."""

    code = "NXDT-P043"
    happened = "trainer.num_nodes is {num_nodes}, no launcher started this process, and {names} is not set."
    remedy = (
        "Run the same command on each node with NODE_RANK=0, 1, …, MASTER_ADDR=<host of node 0> and MASTER_PORT=<a "
        "free port there>; or start it with srun or torchrun."
    )
    num_nodes: int
    missing: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": ", ".join(self.missing)}


class NotEnoughDevices(NxdtError):
    """More ranks on a machine than it has devices."""

    code = "NXDT-P004"
    happened = "{wanted} ranks on {host} would need a device each, and torch finds {found} of type {device_type!r}."
    remedy = (
        "Set trainer.devices to {found} or fewer (and more trainer.num_nodes), or trainer.accelerator to another type; "
        "a variable that hides devices may be set."
    )
    host: str
    wanted: int
    found: int
    device_type: str


class PortTaken(NxdtError):
    """Another process listens where the ranks were to meet."""

    code = "NXDT-P044"
    happened = "Port {port} of {address}, where the ranks are to meet, is in use by another process."
    remedy = "Set MASTER_PORT to a free port, on every node the same, or end the run that holds this one."
    address: str
    port: int


class CannotReachRankZero(NxdtError):
    """No process answers where rank 0 should be."""

    code = "NXDT-P045"
    happened = "{who} on {host} could not reach rank 0 at {address}:{port} within {timeout_s:.0f} s: {reason}."
    remedy = (
        "Check that MASTER_ADDR names the host of rank 0 as this host sees it, that MASTER_PORT is open between them, "
        "and that rank 0 was started. NXDT_JOIN_TIMEOUT_S=… waits longer."
    )
    who: str
    host: str
    address: str
    port: int
    timeout_s: float
    reason: str


class RanksMissing(NxdtError):
    """Some ranks, or nodes, never came."""

    code = "NXDT-P046"
    happened = "Of {total} {unit}s, {count} did not come within {timeout_s:.0f} s: {names}."
    remedy = (
        "Look at the output of those; a batch script of Slurm must start the command with srun. "
        "NXDT_JOIN_TIMEOUT_S=… waits longer."
    )
    unit: str
    """``rank`` or ``node``."""
    total: int
    missing: tuple[int, ...]
    timeout_s: float

    def _view(self) -> dict[str, Any]:
        names = listing([f"{self.unit} {number}" for number in self.missing])
        return {**super()._view(), "count": len(self.missing), "names": names.replace("'", "")}


class RanksDisagree(NxdtError):
    """Ranks that would not compute the same thing."""

    code = "NXDT-P047"
    happened = "The ranks do not run the same: {differences}."
    remedy = "Give all of them the same command line, configuration file, environment and installed packages."
    found: tuple[str, ...]
    """One difference each: what, its values, and on which ranks and hosts."""

    _SHOWN: ClassVar[int] = 8

    def _view(self) -> dict[str, Any]:
        shown = list(self.found[: self._SHOWN])
        more = len(self.found) - len(shown)
        return {**super()._view(), "differences": "; ".join([*shown, *([f"and {more} more"] if more else [])])}


class RankDied(NxdtError):
    """A process that ended without a report."""

    code = "NXDT-P048"
    exit_status: ClassVar[int] = 1
    happened = "Rank {rank} on {host} died{how}; the other ranks were stopped."
    remedy = (
        "A process that the system killed for want of memory is named by `dmesg`; checkpoints that were committed are "
        "complete, and exp_manager.resume_if_exists=true resumes from the newest."
    )
    rank: int
    host: str
    how: str = ""
    """`` by signal SIGKILL`` or the like, where it is known."""


class RankHung(NxdtError):
    """A run in which a rank is silent, or in which no rank makes progress."""

    code = "NXDT-P080"
    exit_status: ClassVar[int] = 1
    happened = "{found}{waiting}"
    remedy = (
        "{where}Checkpoints that were committed are complete, and exp_manager.resume_if_exists=true resumes from the "
        "newest. If a rank may be without progress for longer, raise distributed_strategy.timeout_s."
    )
    kind: str
    """``silent``: a rank sends no heartbeats; ``stuck``: all do, and none makes progress."""
    seconds: float
    ranks: tuple[str, ...]
    """The ranks that hang: name, host, step and last collective of each."""
    waits: tuple[str, ...]
    """Ranks that wait for them, and for what."""
    stacks: str
    """Directory of the files with the ranks' stacks; empty where none could be written."""

    _SHOWN: ClassVar[int] = 4

    def _view(self) -> dict[str, Any]:
        names = "; ".join(self._some(self.ranks))
        if self.kind == "silent":
            found = f"No heartbeat came for {self.seconds:.0f} s from {names}."
        elif self.waits:
            found = f"Other ranks have waited for {self.seconds:.0f} s for {names}."
        else:
            found = f"No rank has made progress for {self.seconds:.0f} s: {names}."
        waiting = f" Waiting: {'; '.join(self._some(self.waits))}." if self.waits else ""
        where = f"The Python stacks of the ranks are in {self.stacks}. " if self.stacks else ""
        return {**super()._view(), "found": found, "waiting": waiting, "where": where}

    @classmethod
    def _some(cls, all_of_them: tuple[str, ...]) -> list[str]:
        more = len(all_of_them) - cls._SHOWN
        return [*all_of_them[: cls._SHOWN], *([f"and {more} more"] if more > 0 else [])]


class OutOfMemory(NxdtError):
    """A device or a host without enough memory for a request."""

    code = "NXDT-P049"
    happened = "Rank {rank} on {host} ran out of memory on {device}: {usage}.{part}"
    remedy = (
        "`nxdt plan` estimates the memory of each part by layout: take a smaller data.micro_batch_size or "
        "data.seq_length, recompute activations (model.activations_checkpoint_granularity), or shard further."
    )
    rank: int
    host: str
    device: str
    usage: str
    """Bytes in use and in total, as far as the device reports them."""
    part: str = ""
    """A sentence on the part of the estimate that was exceeded, with a space before it."""
