"""Tests that every launcher must pass; its author subclasses it once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.launcher_contract import LauncherContract

    class TestMyLauncher(LauncherContract):
        name = "my-launcher"

        @pytest.fixture
        def factory(self):
            return MyLauncher

        @pytest.fixture
        def options(self):
            return MyLauncherConfig(queue="long")

        @pytest.fixture
        def environments(self):  # ranks 0 and 1 are on the first node, 2 and 3 on the second
            return [{"MY_TASK": str(rank), "MY_TASKS": "4", "MY_SLOT": str(rank % 2)} for rank in range(4)]
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml

from nxdt_core.errors import NxdtError
from nxdt_core.protocols.launcher import Job, Launcher, RankEnvironment, Submission
from nxdt_testing.contract import ComponentContract, no_error
from nxdt_testing.processes.side_effects import assert_light, side_effects

__all__ = ["LauncherContract"]

_NODES, _DEVICES = 2, 2
_BESIDES = {"HOME": "/home/someone", "PATH": "/usr/bin:/bin", "USER": "someone", "TERM": "xterm"}
"""Variables of every process."""
_NONSENSE = ("", "nonsense", "-1")
_Factory = Callable[[], Launcher]
_Submit = Callable[[Job], Submission]
_Environments = Sequence[Mapping[str, str]]


class LauncherContract(ComponentContract):
    """The tests of a launcher: subclass it and override the fixtures ``factory``, ``options`` and ``environments``."""

    name: ClassVar[str] = ""
    """Name of the record, which the files of a job must give to ``NXDT_LAUNCHER`` if the launcher joins, too."""

    @pytest.fixture(autouse=True)
    def environment_restored(self) -> Iterator[None]:
        """Undo what a launcher writes into the environment: later tests would take this process for a rank."""
        with mock.patch.dict(os.environ):
            yield

    @pytest.fixture
    def options(self) -> Any:
        """Return an instance of the record's ``config``; None for a launcher without options."""
        return None

    @pytest.fixture
    def environments(self) -> _Environments:
        """Return the variables that the scheduler sets, by rank, in a run on two nodes with two devices each."""
        pytest.skip("override the fixture 'environments' with the variables that the scheduler sets")

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        """Return the run that is submitted: a recipe on two nodes with two devices each, with a space in a value."""
        return Job(
            name="my-run",
            nodes=_NODES,
            devices=_DEVICES,
            train=("train", "recipe:my-model-tiny", "trainer.max_steps=1234", "exp_manager.exp_dir=my runs"),
            compile=(),
            needs_agent=False,
            checkpoints=str(tmp_path / "checkpoints"),
            config={"trainer": {"max_steps": 1234}, "exp_manager": {"exp_dir": "my runs"}},
            config_path=None,
            directory=tmp_path / "launch" / "my-run",
            working_directory=tmp_path,
            command_line="nxdt launch my-launcher recipe:my-model-tiny",
        )

    @pytest.fixture
    def joining(self, factory: _Factory) -> Launcher:
        """Return a launcher; skip the test where it does not join."""
        if not _joins(factory()):
            pytest.skip("it does not override 'join'")
        return factory()

    @pytest.fixture
    def places(self, joining: Launcher, environments: _Environments) -> Sequence[RankEnvironment]:
        """Return the place of each process."""
        processes = _NODES * _DEVICES
        assert len(environments) == processes, f"'environments' must have the variables of {processes} processes"
        places = [joining.join(variables) for variables in environments]
        strange = [place for place in places if not isinstance(place, RankEnvironment)]
        assert not strange, f"join must return the RankEnvironment of each process; it returned {strange[0]!r}"
        return [place for place in places if place is not None]

    @pytest.fixture
    def submit(self, factory: _Factory, options: Any) -> _Submit:
        """Return what submits a job; skip the test where the launcher does not submit."""
        if not factory().submits():
            pytest.skip("it does not override 'submission'")
        return lambda job: factory().submission(job, options)

    @pytest.fixture
    def submission(self, submit: _Submit, job: Job) -> Submission:
        """Return the submission of the job."""
        return submit(job)

    def test_it_is_a_launcher(self, factory: _Factory) -> None:
        """It inherits from the base class."""
        assert isinstance(factory(), Launcher), "inherit from nxdt_core.protocols.launcher.Launcher"

    def test_its_modules_import_nothing_heavy(self, factory: _Factory, options: Any) -> None:
        """Every process of a run imports them before torch, and `nxdt launch --help` does, too."""
        assert_light(*sorted({factory.__module__, type(options).__module__} - {"builtins"}))

    def test_a_process_that_it_did_not_start_does_not_join(self, factory: _Factory) -> None:
        """If none of its variables is set, ``join`` returns None."""
        for variables in ({}, _BESIDES):
            place = factory().join(variables)
            assert place is None, f"join must return None without variables of the scheduler; it returned {place}"

    def test_every_process_has_its_rank(self, places: Sequence[RankEnvironment]) -> None:
        """Rank, number of processes, and number of the device on its node."""
        for rank, place in enumerate(places):
            ranks = (place.rank, place.world_size, place.local_rank)
            wanted = (rank, len(places), rank % _DEVICES)
            assert ranks == wanted, f"rank {rank} must have rank, world_size, local_rank {wanted}; it has {ranks}"

    def test_all_processes_meet_at_one_address(
        self, places: Sequence[RankEnvironment], environments: _Environments
    ) -> None:
        """The host and the port of rank 0's store are the same in all, usable, and not the process's own host."""
        addresses = {(place.master_addr, place.master_port) for place in places}
        assert len(addresses) == 1, (
            f"the processes of a run must get one master_addr and master_port; they got {addresses}"
        )
        ((host, port),) = addresses
        right = host and isinstance(port, int) and 0 < port < 65536
        assert right, f"rank 0 must have a host, and a port from 1 to 65535; they are {host!r} and {port!r}"
        # The tests run all processes on one host, so its own name or address looks like a common one.
        here = host.startswith(("localhost", "127.", "::1")) or _short(host) == _short(socket.gethostname())
        named = any(host in value for variables in environments for value in variables.values())
        assert named or not here, f"master_addr must be the host of rank 0; {host!r} is another host on each node"

    def test_wrong_and_missing_variables_are_errors(self, joining: Launcher, environments: _Environments) -> None:
        """A variable that is needed, and is missing or invalid, raises an error of nxdt and no other exception."""
        right = environments[1]
        wrong = [
            (f"no {name}", {variable: right[variable] for variable in right if variable != name}) for name in right
        ]
        wrong += [(f"{name}={value!r}", {**right, name: value}) for name in right for value in _NONSENSE]
        for name, changed in wrong:
            message = f"with {name} join must return None or raise an NxdtError, such as BadLaunchVariable; it raised"
            with suppress(NxdtError), no_error(message, but=NxdtError):
                place = joining.join(changed)
                assert place is None or 0 <= place.rank < place.world_size, f"with {name} join returned {place}"

    def test_joining_changes_nothing(self, joining: Launcher, environments: _Environments) -> None:
        """It reads the mapping that it gets, writes no variables, and says the same again."""
        before = dict(os.environ)
        for variables in environments:
            first, again = joining.join(variables), joining.join(MappingProxyType(dict(variables)))
            assert first == again, f"join returned {first}, and {again} when it was asked again"
        changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        assert not changed, f"join must not write variables, nxdt does; it changed {', '.join(sorted(changed))}"

    def test_a_submission_has_files_and_a_command(self, submission: Submission) -> None:
        """Files below the directory of the job, with text, and the words of a command."""
        assert isinstance(submission, Submission), f"submission must return a Submission; it returned {submission!r}"
        assert submission.files, "a submission must have at least one file"
        for name, text in submission.files.items():
            path = PurePosixPath(name)
            inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
            assert inside, f"the file {name!r} must be below the directory of the job"
            assert text and isinstance(text, str), f"the file {name!r} must have text; it is {text!r}"  # noqa: PT018
        words = submission.command
        right = isinstance(words, tuple) and words and all(isinstance(word, str) and word for word in words)
        assert right, f"the command must be a tuple of words, none of them empty; it is {words!r}"

    def test_the_files_of_a_job_train_with_all_its_arguments(self, submit: _Submit, job: Job) -> None:
        """Every word of ``nxdt train`` is there, quoted where it has a space; with ``compile`` also those."""
        _assert_has(submit(job), job.train)
        compiling = dataclasses.replace(job, compile=("compile", job.train[1], "trainer.max_steps=1235"))
        _assert_has(submit(compiling), (*compiling.compile, *compiling.train))

    def test_the_files_of_a_job_follow_its_nodes(self, submission: Submission, submit: _Submit, job: Job) -> None:
        """Another number of nodes changes the files or the command."""
        more = submit(dataclasses.replace(job, nodes=_NODES + 1))
        same = (submission.files, submission.command) == (more.files, more.command)
        assert not same, f"a job on {_NODES} nodes and one on {_NODES + 1} get the same files and command"

    def test_a_job_has_the_same_files_again(self, submission: Submission, submit: _Submit, job: Job) -> None:
        """`nxdt launch` refuses to replace a file by another text: no clock and no random names."""
        assert submit(job) == submission, "the submission of the same job differs when it is asked for again"

    def test_a_submission_writes_and_starts_nothing(self, submit: _Submit, job: Job) -> None:
        """`nxdt launch` writes the files, and calls the command where the user asks for it."""
        with side_effects() as effects:
            submit(job)
        assert not effects, f"submission must only return text; it {effects[0]}"

    def test_the_files_of_a_job_name_the_launcher(self, factory: _Factory, submission: Submission) -> None:
        """Processes ask the launcher of a plugin where ``NXDT_LAUNCHER`` has its name."""
        if not self.name or not _joins(factory()):
            pytest.skip("it has no name, or does not join")
        lines = [line for text in submission.files.values() for line in text.splitlines()]
        named = any("NXDT_LAUNCHER" in line and self.name in line for line in lines)
        assert named, f"no file of the job sets NXDT_LAUNCHER to {self.name!r}, so that no process would ask it"


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _joins(launcher: Launcher) -> bool:
    return type(launcher).join is not Launcher.join


def _assert_has(submission: Submission, words: Sequence[str]) -> None:
    texts = list(submission.files.values())  # and every string in those that are YAML or JSON
    for text in submission.files.values():
        with suppress(yaml.YAMLError):
            trees = [tree for tree in yaml.safe_load_all(text) if not isinstance(tree, str)]
            texts += [leaf for tree in trees for leaf in _leaves(tree)]
    for word in words:
        wanted = (f"'{word}", f'"{word}') if " " in word else (word,)  # quoted, unless it is a string of YAML
        present = any(text == word or any(word_wanted in text for word_wanted in wanted) for text in texts)
        quote = " as one word: quote it, as shlex.join does" if " " in word else ""
        assert present, f"no file has the argument {word!r}{quote}; the job calls: nxdt {' '.join(words)}"


def _leaves(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return [leaf for item in inner for leaf in _leaves(item)]
