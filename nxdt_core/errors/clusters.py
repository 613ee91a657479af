"""Errors of launchers and of jobs for clusters: codes ``NXDT-P11…`` and ``NXDT-P12…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError

LaunchersDisagree = NxdtError.define(
    "NXDT-P110",
    "Variables of one or two launchers that contradict each other.",
    "The environment contradicts itself: {contradiction}.",
    "Let one launcher set these variables and unset those that another program or a job script left; "
    "NXDT_LAUNCHER={launcher} takes those of one launcher alone.",
)

NotStartedByLauncher = NxdtError.define(
    "NXDT-P111",
    "``NXDT_LAUNCHER`` names a launcher that did not start this process.",
    "NXDT_LAUNCHER is {launcher!r}, and the environment has no variables of that launcher.",
    "Start the command through that launcher, or unset NXDT_LAUNCHER.",
)


class CannotSubmit(NxdtError):
    """``nxdt launch`` with a launcher that only joins processes and submits no jobs."""

    code = "NXDT-P112"
    happened = "The launcher {launcher!r} joins processes that something else has started, and submits no jobs."
    remedy = "Choose a launcher that `nxdt launch --help` lists, or start the processes yourself."
    launcher: str


def _cluster_has_other_devices(error: Any) -> dict[str, Any]:
    more = error.found > error.wanted
    advice = "devices that no process uses are paid for." if more else "a process cannot have less than one device."
    return {"advice": advice}


ClusterHasOtherDevices = NxdtError.define(
    "NXDT-P113",
    "A cluster whose nodes have another number of devices than the run uses on each.",
    "{source} says {found} devices for each node, and trainer.devices is {wanted}.",
    "Set trainer.devices={found} (and the layout with it), or correct the number of devices: {advice}",
    also=_cluster_has_other_devices,
)

ClusterHasOtherNodes = NxdtError.define(
    "NXDT-P114",
    "A cluster file with another number of nodes than the run uses.",
    "The cluster file {path} says {found} nodes, and --nodes is {wanted}.",
    "Set one of them to the other number, or leave one out.",
)

LauncherNeedsOption = NxdtError.define(
    "NXDT-P115",
    "An option that a launcher cannot do without.",
    "The launcher {launcher!r} needs {option}: {reason}.",
    "Give --{flag}=…, or write {option}: … into the cluster file of --cluster.",
    also=lambda error: {"flag": error.option.replace("_", "-")},
)

JobFileExists = NxdtError.define(
    "NXDT-P116",
    "A file of a job that would be replaced by another one.",
    "{path} exists and is another file than the one that would be written.",
    "Write to another directory with --output, or replace it with --force.",
)

JobFileUnwritable = NxdtError.define(
    "NXDT-P117",
    "A directory for the files of a job that cannot be written.",
    "{path} cannot be written: {reason}.",
    "Name a directory on the shared file system that this user may write with --output.",
)

SubmitCommandMissing = NxdtError.define(
    "NXDT-P118",
    "The scheduler's program is not installed here.",
    "{program} is not on this machine's PATH, so the job was not submitted; its files are written.",
    "Run this where the scheduler's programs are installed: cd {directory} && {command}",
)

SubmitFailed = NxdtError.define(
    "NXDT-P119",
    "The scheduler refused a job.",
    "{command} ended with status {status}: {output}",
    "Correct what it says in the options or the cluster file, and submit again; the files are in {directory}.",
    exit_status=1,
)

SecretsInJobFiles = NxdtError.define(
    "NXDT-P120",
    "A configuration with literal secrets that would have to be written into the files of a job.",
    "The job's files contain the configuration, and these keys hold secrets: {keys:list}.",
    "Write a reference such as ${{oc.env:NAME}} in the configuration, and set NAME where the job runs.",
)

RestartsNeedResume = NxdtError.define(
    "NXDT-P121",
    "``--max-restarts`` of a run that would begin again at step 0.",
    "--max-restarts is {restarts}, and checkpoint.resume_if_exists is false: a restart would not resume.",
    "Set checkpoint.resume_if_exists=true checkpoint.resume_ignore_no_checkpoint=true, or leave it out.",
)

NodeAlreadyJoined = NxdtError.define(
    "NXDT-P122",
    "Two launchers with the same node number.",
    "Another launcher has already joined as node {number} at {address}:{port}.",
    "Give each node another NODE_RANK. After a restart of this node alone, wait until the launcher on node 0 has "
    "noticed the loss.",
)
