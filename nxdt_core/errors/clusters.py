"""Errors of launchers and of jobs for clusters: codes ``NXDT-P11…`` and ``NXDT-P12…``."""

from __future__ import annotations

from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "CannotSubmit",
    "ClusterHasOtherDevices",
    "ClusterHasOtherNodes",
    "JobFileExists",
    "JobFileUnwritable",
    "LauncherNeedsOption",
    "LaunchersDisagree",
    "NodeAlreadyJoined",
    "NotStartedByLauncher",
    "RestartsNeedResume",
    "SecretsInJobFiles",
    "SubmitCommandMissing",
    "SubmitFailed",
]


class LaunchersDisagree(NxdtError):
    """Variables of one or two launchers that contradict each other."""

    code = "NXDT-P110"
    happened = "The environment contradicts itself: {contradiction}."
    remedy = (
        "Let one launcher set these variables and unset those that another program or a job script left; "
        "NXDT_LAUNCHER={launcher} takes those of one launcher alone."
    )
    contradiction: str
    launcher: str


class NotStartedByLauncher(NxdtError):
    """``NXDT_LAUNCHER`` names a launcher that did not start this process."""

    code = "NXDT-P111"
    happened = "NXDT_LAUNCHER is {launcher!r}, and the environment has no variables of that launcher."
    remedy = "Start the command through that launcher, or unset NXDT_LAUNCHER."
    launcher: str


class CannotSubmit(NxdtError):
    """``nxdt launch`` with a launcher that only joins processes and submits no jobs."""

    code = "NXDT-P112"
    happened = "The launcher {launcher!r} joins processes that something else has started, and submits no jobs."
    remedy = "Choose a launcher that `nxdt launch --help` lists, or start the processes yourself."
    launcher: str


class ClusterHasOtherDevices(NxdtError):
    """A cluster whose nodes have another number of devices than the run uses on each."""

    code = "NXDT-P113"
    happened = "{source} says {found} devices for each node, and trainer.devices is {wanted}."
    remedy = "Set trainer.devices={found} (and the layout with it), or correct the number of devices: {advice}"
    source: str
    """Where the number comes from: a key of the cluster file or an option."""
    found: int
    wanted: int

    def _view(self) -> dict[str, Any]:
        more = self.found > self.wanted
        advice = "devices that no process uses are paid for." if more else "a process cannot have less than one device."
        return {**super()._view(), "advice": advice}


class ClusterHasOtherNodes(NxdtError):
    """A cluster file with another number of nodes than the run uses."""

    code = "NXDT-P114"
    happened = "The cluster file {path} says {found} nodes, and --nodes is {wanted}."
    remedy = "Set one of them to the other number, or leave one out."
    path: str
    found: int
    wanted: int


class LauncherNeedsOption(NxdtError):
    """An option that a launcher cannot do without."""

    code = "NXDT-P115"
    happened = "The launcher {launcher!r} needs {option}: {reason}."
    remedy = "Give --{flag}=…, or write {option}: … into the cluster file of --cluster."
    launcher: str
    option: str
    reason: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "flag": self.option.replace("_", "-")}


class JobFileExists(NxdtError):
    """A file of a job that would be replaced by another one."""

    code = "NXDT-P116"
    happened = "{path} exists and is another file than the one that would be written."
    remedy = "Write to another directory with --output, or replace it with --force."
    path: str


class JobFileUnwritable(NxdtError):
    """A directory for the files of a job that cannot be written."""

    code = "NXDT-P117"
    happened = "{path} cannot be written: {reason}."
    remedy = "Name a directory on the shared file system that this user may write with --output."
    path: str
    reason: str


class SubmitCommandMissing(NxdtError):
    """The scheduler's program is not installed here."""

    code = "NXDT-P118"
    happened = "{program} is not on this machine's PATH, so the job was not submitted; its files are written."
    remedy = "Run this where the scheduler's programs are installed: cd {directory} && {command}"
    program: str
    directory: str
    command: str


class SubmitFailed(NxdtError):
    """The scheduler refused a job."""

    code = "NXDT-P119"
    exit_status: ClassVar[int] = 1
    happened = "{command} ended with status {status}: {output}"
    remedy = "Correct what it says in the options or the cluster file, and submit again; the files are in {directory}."
    command: str
    status: int
    output: str
    directory: str


class SecretsInJobFiles(NxdtError):
    """A configuration with literal secrets that would have to be written into the files of a job."""

    code = "NXDT-P120"
    happened = "The job's files contain the configuration, and these keys hold secrets: {names}."
    remedy = "Write a reference such as ${{oc.env:NAME}} in the configuration, and set NAME where the job runs."
    keys: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.keys)}


class RestartsNeedResume(NxdtError):
    """``--max-restarts`` of a run that would begin again at step 0."""

    code = "NXDT-P121"
    happened = "--max-restarts is {restarts}, and exp_manager.resume_if_exists is false: a restart would not resume."
    remedy = "Set exp_manager.resume_if_exists=true exp_manager.resume_ignore_no_checkpoint=true, or leave it out."
    restarts: int


class NodeAlreadyJoined(NxdtError):
    """Two launchers with the same node number."""

    code = "NXDT-P122"
    happened = "Another launcher has already joined as node {number} at {address}:{port}."
    remedy = (
        "Give each node another NODE_RANK. After a restart of this node alone, wait until the launcher on node 0 has "
        "noticed the loss."
    )
    number: int
    address: str
    port: int
