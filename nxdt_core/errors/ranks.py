"""Errors of starting many ranks, of their agreement and of their end: codes ``NXDT-P004``, ``NXDT-P04…`` and
``NXDT-P08…``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nxdt_core.errors.base import NxdtError, listing

LaunchEnvironmentIncomplete = NxdtError.define(
    "NXDT-P040",
    "Some variables of a launcher are set and others are not.",
    "{reason} set in the environment without {missing:, }.",
    "Let the launcher set all of them, or unset those that another program left there.",
)

BadLaunchVariable = NxdtError.define(
    "NXDT-P041",
    "A launcher's variable that cannot be read.",
    "The environment variable {name} is {value!r}, which is not {wanted}.",
    "Correct it where the processes are started, or unset it to run without that launcher.",
)

WorldSizeMismatch = NxdtError.define(
    "NXDT-P042",
    "Another number of processes was started than the configuration speaks of.",
    "{launcher} started {processes}, and trainer.devices={devices} x trainer.num_nodes={num_nodes} asks for {wanted}.",
    "Start {wanted} (one per device), or set trainer.devices and trainer.num_nodes to what is started.",
    also=lambda error: {
        "processes": "1 process" if error.found == 1 else f"{error.found} processes",
        "wanted": error.devices * error.num_nodes,
    },
)

NodePlaceMissing = NxdtError.define(
    "NXDT-P043",
    "A run over several nodes in which the number of this node is unknown.",
    "trainer.num_nodes is {num_nodes}, no launcher started this process, and {missing:, } is not set.",
    "Run the same command on each node with NODE_RANK=0, 1, …, MASTER_ADDR=<host of node 0> and MASTER_PORT=<a "
    "free port there>; or start it with srun or torchrun.",
)

NotEnoughDevices = NxdtError.define(
    "NXDT-P004",
    "More ranks on a machine than it has devices.",
    "{wanted} ranks on {host} would need a device each, and torch finds {found} of type {device_type!r}.",
    "Set trainer.devices to {found} or fewer (and more trainer.num_nodes), or trainer.accelerator to another type; "
    "a variable that hides devices may be set.",
)

PortTaken = NxdtError.define(
    "NXDT-P044",
    "Another process listens where the ranks were to meet.",
    "Port {port} of {address}, where the ranks are to meet, is in use by another process.",
    "Set MASTER_PORT to a free port, on every node the same, or end the run that holds this one.",
)

CannotReachRankZero = NxdtError.define(
    "NXDT-P045",
    "No process answers where rank 0 should be.",
    "{who} on {host} could not reach rank 0 at {address}:{port} within {timeout_s:.0f} s: {reason}.",
    "Check that MASTER_ADDR names the host of rank 0 as this host sees it, that MASTER_PORT is open between them, "
    "and that rank 0 was started. NXDT_JOIN_TIMEOUT_S=… waits longer.",
)

RanksMissing = NxdtError.define(
    "NXDT-P046",
    "Some ranks, or nodes, never came.",
    "Of {total} {unit}s, {count} did not come within {timeout_s:.0f} s: {names}.",
    "Look at the output of those; a batch script of Slurm must start the command with srun. "
    "NXDT_JOIN_TIMEOUT_S=… waits longer.",
    also=lambda error: {
        "count": len(error.missing),
        "names": listing([f"{error.unit} {number}" for number in error.missing]).replace("'", ""),
    },
)

RanksDisagree = NxdtError.define(
    "NXDT-P047",
    "Ranks that would not compute the same thing.",
    "The ranks do not run the same: {differences}.",
    "Give all of them the same command line, configuration file, environment and installed packages.",
    also=lambda error: {"differences": "; ".join(_some(error.found, 8))},
)

RankDied = NxdtError.define(
    "NXDT-P048",
    "A process that ended without a report.",
    "Rank {rank} on {host} died{how}; the other ranks were stopped.",
    "A process that the system killed for want of memory is named by `dmesg`; checkpoints that were committed are "
    "complete, and checkpoint.resume_if_exists=true resumes from the newest.",
    exit_status=1,
    defaults={"how": ""},
)


def _rank_hung(error: Any) -> dict[str, str]:
    names = "; ".join(_some(error.ranks, 4))
    if error.kind == "silent":
        summary = f"No heartbeat came for {error.seconds:.0f} s from {names}."
    elif error.waits:
        summary = f"Other ranks have waited for {error.seconds:.0f} s for {names}."
    else:
        summary = f"No rank has made progress for {error.seconds:.0f} s: {names}."
    waiting = f" Waiting: {'; '.join(_some(error.waits, 4))}." if error.waits else ""
    where = f"The Python stacks of the ranks are in {error.stacks}. " if error.stacks else ""
    return {"found": summary, "waiting": waiting, "where": where}


def _some(lines: Sequence[str], limit: int) -> list[str]:
    more = len(lines) - limit
    return [*lines[:limit], *([f"and {more} more"] if more > 0 else [])]


RankHung = NxdtError.define(
    "NXDT-P080",
    "A run in which a rank is silent, or in which no rank makes progress.",
    "{found}{waiting}",
    "{where}Checkpoints that were committed are complete, and checkpoint.resume_if_exists=true resumes from the "
    "newest. If a rank may be without progress for longer, raise distributed_strategy.timeout_s.",
    exit_status=1,
    also=_rank_hung,
)
"""``kind``: ``silent`` where a rank sends no heartbeats, ``stuck`` where all do and none makes progress; ``ranks`` that
hang, each with its name, host, step and last collective; ``waits``: ranks that wait for them, and for what; ``stacks``:
directory of the ranks' stacks."""

OutOfMemory = NxdtError.define(
    "NXDT-P049",
    "A device or a host without enough memory for a request.",
    "Rank {rank} on {host} ran out of memory on {device}: {usage}.{part}",
    "`nxdt plan` estimates the memory of each part by layout: take a smaller data.micro_batch_size or "
    "data.seq_length, recompute activations (model.activations_checkpoint_granularity), or shard further.",
    defaults={"part": ""},
)
