"""The files of a job, from a configuration and the options of a cluster, and their submission. No torch here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.config.read import interpolate, read_part
from nxdt_core.config.show import drop_replaced, shown_words
from nxdt_core.config.sources import COMMAND_LINE, RECIPE_SCHEME, read_source
from nxdt_core.config.tree import MASK, Tree, plain
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.launch import (
    CannotSubmit,
    ClusterHasOtherDevices,
    ClusterHasOtherNodes,
    JobFileExists,
    JobFileUnwritable,
    SecretsInJobFiles,
    SubmitCommandMissing,
    SubmitFailed,
)
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.launch.launchers.config import instance_of
from nxdt_core.protocols.launcher import Job, Launcher, Submission
from nxdt_core.system.regular_files import make_directory, read_text, replace_text

_RESUME = ("checkpoint.resume_if_exists=true", "checkpoint.resume_ignore_no_checkpoint=true")
_NAME_LENGTH = 48
"""Kubernetes allows 63 characters in the name of a pod, which has the number of the node behind it."""


def prepare(
    component: RegisteredComponent,
    source: str,
    overrides: Sequence[str],
    *,
    nodes: int | None,
    cluster: Path | None,
    given: Mapping[str, Any],
    directory: Path | None,
    command_line: str,
) -> tuple[Job, ResolvedConfig, Submission]:
    """Check a run against a cluster and return the job with its files, unwritten.

    Args:
        component: the launcher.
        source: configuration file or ``recipe:NAME``.
        overrides: ``key=value`` words of the command line.
        nodes: of the run; None takes the cluster file's, or ``trainer.num_nodes``.
        cluster: a YAML file with options of the launcher.
        given: options of the command line.
        directory: for the files; None: ``launch/NAME``.
        command_line: for a comment in the files.

    Raises:
        CannotSubmit: the launcher only joins.
        ConfigError: the configuration or the cluster file is wrong.
        ClusterHasOtherDevices: nodes have another number of devices than the run uses.
        ClusterHasOtherNodes: the cluster file says another number of nodes.
        NxdtError: what the launcher refuses.
    """
    launcher = component.load_class(Launcher)
    if not launcher.submits():
        raise CannotSubmit(launcher=component.record.name)
    options, cls = None, component.load_config()
    if cls is not None:
        label, tree = COMMAND_LINE.where, Tree({}, {(): COMMAND_LINE})
        if cluster is not None:
            options_file = read_source(cluster, Kernel.start)
            label, tree = options_file.label, options_file.tree
            if options_file.problems:
                raise ConfigError(source=label, problems=options_file.problems)
        for key, value in given.items():
            tree.set(key, value, COMMAND_LINE)
        problems = interpolate(tree)
        options, wrong = read_part(cls, tree)
        if problems or wrong:
            raise ConfigError(source=label, problems=(*problems, *wrong))
    option = plain({} if options is None else options).get
    in_file = option("nodes")
    if nodes is not None and in_file is not None and nodes != in_file:
        raise ClusterHasOtherNodes(path=str(cluster), found=in_file, wanted=nodes)
    nodes = in_file if nodes is None else nodes
    words = (*drop_replaced(overrides), *([] if nodes is None else [f"trainer.num_nodes={nodes}"]))
    config = load(source, words)
    # A cluster with more or fewer devices per node than the layout uses wastes them, or cannot start the run.
    devices, key, wanted = option("devices_per_node"), "devices_per_node", config.run.trainer.devices
    if devices is None and (instance := instance_of(option("instance_type"))) is not None:
        devices, key = instance.devices, "instance_type"
    if devices not in (None, wanted):
        where = f"{key} of {cluster}" if cluster is not None else f"--{key.replace('_', '-')}"
        raise ClusterHasOtherDevices(source=where, found=devices, wanted=wanted)
    run = config.run
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "nxdt"
    path = None if config.source.startswith(RECIPE_SCHEME) else Path(config.source).expanduser().absolute()
    arguments = (config.source if path is None else str(path), *shown_words(config, words))
    engine = config.selected("engine").component.record.capabilities
    compiles = option("compile")
    if compiles is None:
        compiles = "xla" in engine or bool(run.model.compile)
    job = Job(
        name=name,
        nodes=run.trainer.num_nodes,
        devices=run.trainer.devices,
        train=("train", *arguments, *(word for word in _RESUME if word not in words)),
        compile=("compile", *arguments) if compiles else (),
        needs_agent="xla" in engine,
        checkpoints=config.checkpoint_uri,
        config=config.to_dict(),
        config_path=path,
        directory=(directory or Path("launch") / name).absolute(),
        working_directory=Path.cwd(),
        command_line=command_line,
    )
    submission = launcher().submission(job, options)
    if any(MASK in text for text in submission.files.values()):  # a masked secret would be taken for the secret
        raise SecretsInJobFiles(keys=tuple(_masked(config.to_dict())))
    return job, config, submission


def write(job: Job, submission: Submission, *, force: bool = False) -> tuple[Path, ...]:
    """Write the files of a job and make the directory of its logs.

    Raises:
        JobFileExists: another file of that name exists, and ``force`` is false.
        JobFileUnwritable: the directory cannot be written.
    """
    written = []
    try:
        make_directory(job.directory / "logs")
        for name, text in submission.files.items():
            path = job.directory / name
            if not force and os.path.lexists(path) and read_text(path, errors="replace") != text:
                raise JobFileExists(path=str(path))
            replace_text(path, text)
            written.append(path)
    except OSError as error:
        raise JobFileUnwritable(
            path=str(error.filename or job.directory), reason=(error.strerror or str(error)).lower()
        ) from error
    return tuple(written)


def submit(job: Job, submission: Submission) -> str:
    """Submit a job whose files are written to its scheduler, and return the scheduler's output.

    Raises:
        SubmitCommandMissing: the scheduler's program is not installed here.
        SubmitFailed: the scheduler refuses the job.
    """
    program = submission.command[0]
    command = shlex.join(submission.command)
    if shutil.which(program) is None:
        raise SubmitCommandMissing(program=program, directory=str(job.directory), command=command)
    done = subprocess.run(submission.command, cwd=job.directory, capture_output=True, text=True, check=False)
    output = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise SubmitFailed(command=command, status=done.returncode, output=output, directory=str(job.directory))
    return output


def _masked(tree: Any, path: str = "") -> list[str]:
    if isinstance(tree, Mapping):
        return [masked for key, value in tree.items() for masked in _masked(value, f"{path}.{key}".lstrip("."))]
    if isinstance(tree, (list, tuple)):
        return [masked for number, value in enumerate(tree) for masked in _masked(value, f"{path}[{number}]")]
    return [path] if isinstance(tree, str) and MASK in tree else []
