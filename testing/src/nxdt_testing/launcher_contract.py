"""What every launcher must keep; its author subclasses it once for each set of options.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml

from nxdt_core.errors import NxdtError
from nxdt_core.errors.clusters import CannotSubmit
from nxdt_core.protocols.launcher import Job, Launcher, Place, Submission
from nxdt_testing.processes.light_modules import heavy_imports
from nxdt_testing.processes.side_effects import side_effects

__all__ = ["LauncherContract"]

_NODES, _DEVICES = 2, 2
_BESIDES = {"HOME": "/home/someone", "PATH": "/usr/bin:/bin", "USER": "someone", "TERM": "xterm"}
"""Variables of every process."""
_NONSENSE = ("", "nonsense", "-1")


class LauncherContract:
    """The tests of a launcher: subclass it and override the fixtures ``factory``, ``options`` and ``environments``."""

    name: ClassVar[str] = ""
    """Name of the record, which the files of a job must give to ``NXDT_LAUNCHER`` if the launcher joins, too."""
    capabilities: ClassVar[frozenset[str]] = frozenset({"join", "submit"})
    """Of the record."""

    @pytest.fixture(autouse=True)
    def environment_restored(self) -> Iterator[None]:
        """Undo what a launcher writes into the environment: later tests would take this process for a rank."""
        with mock.patch.dict(os.environ):
            yield

    @pytest.fixture
    def factory(self) -> Callable[[], Launcher]:
        """Return the target of the record."""
        raise NotImplementedError("override the fixture 'factory'")

    @pytest.fixture
    def options(self) -> Any:
        """Return an instance of the record's ``config``; None for a launcher without options."""
        return None

    @pytest.fixture
    def environments(self) -> Sequence[Mapping[str, str]]:
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
    def joins(self) -> None:
        """Skip the test where the launcher does not join."""
        if "join" not in self.capabilities:
            pytest.skip("it does not declare 'join'")

    @pytest.fixture
    def submission(self, factory: Callable[[], Launcher], job: Job, options: Any) -> Submission:
        """Return the submission of the job; skip the test where the launcher does not submit."""
        if "submit" not in self.capabilities:
            pytest.skip("it does not declare 'submit'")
        return factory().submission(job, options)

    def test_it_is_a_launcher(self, factory: Callable[[], Launcher]) -> None:
        """It has the methods of the protocol."""
        assert isinstance(factory(), Launcher), (
            f"{_name(factory)}() must return an object with the methods join and submission"
        )

    def test_its_modules_import_nothing_heavy(self, factory: Callable[[], Launcher], options: Any) -> None:
        """Every process of a run imports them before torch, and `nxdt launch --help` does, too."""
        modules = {factory.__module__, *([] if options is None else [type(options).__module__])}
        heavy = heavy_imports(*sorted(modules))
        assert not heavy, f"importing {' and '.join(sorted(modules))} imports {', '.join(heavy)}"

    def test_a_process_that_it_did_not_start_does_not_join(self, factory: Callable[[], Launcher]) -> None:
        """If none of its variables is set, ``join`` returns None."""
        for variables in ({}, _BESIDES):
            place = factory().join(variables)
            assert place is None, f"join must return None without variables of the scheduler; it returned {place}"

    @pytest.mark.usefixtures("joins")
    def test_every_process_has_its_rank(
        self, factory: Callable[[], Launcher], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """Rank, number of processes, and number of the device on its node."""
        for rank, place in enumerate(_places(factory, environments)):
            found = (place.rank, place.world_size, place.local_rank)
            wanted = (rank, len(environments), rank % _DEVICES)
            assert found == wanted, (
                f"rank {rank} must have (rank, world_size, local_rank) = {wanted}; join returned {found}"
            )

    @pytest.mark.usefixtures("joins")
    def test_all_processes_meet_at_one_address(
        self, factory: Callable[[], Launcher], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """The host and the port of rank 0's store are the same in all, and usable."""
        found = {(place.master_addr, place.master_port) for place in _places(factory, environments)}
        assert len(found) == 1, f"the processes of a run must get one master_addr and master_port; they got {found}"
        ((host, port),) = found
        assert host, "master_addr is empty; it must be the host of rank 0"
        assert isinstance(port, int), f"master_port must be an int; it is {port!r}"
        assert 0 < port < 65536, f"master_port must be from 1 to 65535; it is {port}"

    @pytest.mark.usefixtures("joins")
    def test_wrong_and_missing_variables_are_errors(
        self, factory: Callable[[], Launcher], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """One that is needed, and is missing or holds nonsense, ends in an error of nxdt and in no other exception."""
        for name, changed in _damaged(environments[1]):
            try:
                place = factory().join(changed)
            except NxdtError:
                continue
            except Exception as error:
                pytest.fail(
                    f"with {name} join raised {type(error).__name__}: {error}; raise an NxdtError, such as "
                    "LaunchEnvironmentIncomplete or BadLaunchVariable, or return None"
                )
            if place is not None:
                right = 0 <= place.rank < place.world_size
                assert right, f"with {name} join returned rank {place.rank} of {place.world_size} processes"

    @pytest.mark.usefixtures("joins")
    def test_joining_changes_nothing(
        self, factory: Callable[[], Launcher], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """It reads the mapping that it gets, writes no variables, and says the same again."""
        before = dict(os.environ)
        launcher = factory()
        for variables in environments:
            first, again = launcher.join(variables), launcher.join(MappingProxyType(dict(variables)))
            assert first == again, f"join returned {first}, and {again} when it was asked again"
        changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        assert not changed, f"join must not write variables, nxdt does; it changed {', '.join(sorted(changed))}"

    def test_a_launcher_that_submits_nothing_says_so(
        self, factory: Callable[[], Launcher], job: Job, options: Any
    ) -> None:
        """Without the capability ``submit`` it raises CannotSubmit."""
        if "submit" in self.capabilities:
            pytest.skip("it declares 'submit'")
        try:
            found = factory().submission(job, options)
        except CannotSubmit:
            return
        except Exception as error:
            pytest.fail(f"submission must raise CannotSubmit; it raised {type(error).__name__}: {error}")
        pytest.fail(f"submission must raise CannotSubmit, since 'submit' is not declared; it returned {found}")

    def test_a_submission_has_files_and_a_command(self, submission: Submission) -> None:
        """Files below the directory of the job, with text, and the words of a command."""
        assert isinstance(submission, Submission), (
            f"submission must return a Submission; it returned a {type(submission).__name__}"
        )
        assert submission.files, "a submission must have at least one file"
        for name, text in submission.files.items():
            path = PurePosixPath(name)
            inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
            assert inside, f"the file {name!r} must be below the directory of the job"
            assert isinstance(text, str), f"the file {name!r} must be text; it is a {type(text).__name__}"
            assert text, f"the file {name!r} is empty"
        words = submission.command
        assert isinstance(words, tuple), f"the command must be a tuple of words; it is {words!r}"
        assert words, "the command has no words"
        assert all(isinstance(word, str) and word for word in words), f"the command {words!r} has an empty word"

    def test_the_files_of_a_job_train_with_all_its_arguments(
        self, submission: Submission, job: Job, factory: Callable[[], Launcher], options: Any
    ) -> None:
        """Every word of ``nxdt train`` is there, quoted where it has a space; with ``compile`` also those."""
        self._assert_has(submission, job.train)
        compiling = dataclasses.replace(job, compile=("compile", job.train[1], "trainer.max_steps=1235"))
        self._assert_has(factory().submission(compiling, options), (*compiling.compile, *compiling.train))

    def test_the_files_of_a_job_follow_its_nodes(
        self, submission: Submission, factory: Callable[[], Launcher], job: Job, options: Any
    ) -> None:
        """Another number of nodes changes the files or the command."""
        more = factory().submission(dataclasses.replace(job, nodes=_NODES + 1), options)
        same = (submission.files, submission.command) == (more.files, more.command)
        assert not same, f"a job on {_NODES} nodes and one on {_NODES + 1} get the same files and command"

    def test_a_job_has_the_same_files_again(
        self, submission: Submission, factory: Callable[[], Launcher], job: Job, options: Any
    ) -> None:
        """`nxdt launch` refuses to replace a file by another text: no clock and no random names."""
        again = factory().submission(job, options)
        assert again == submission, "the submission of the same job differs when it is asked for again"

    @pytest.mark.usefixtures("submission")
    def test_a_submission_writes_and_starts_nothing(
        self, factory: Callable[[], Launcher], job: Job, options: Any
    ) -> None:
        """`nxdt launch` writes the files, and calls the command where the user asks for it."""
        with side_effects() as found:
            factory().submission(job, options)
        assert not found, f"submission must only return text; it {found[0]}"

    def test_the_files_of_a_job_name_the_launcher(self, submission: Submission) -> None:
        """Processes ask the launcher of a plugin where ``NXDT_LAUNCHER`` has its name."""
        if not self.name or "join" not in self.capabilities:
            pytest.skip("it has no name, or does not join")
        text = "\n".join(submission.files.values())
        named = any("NXDT_LAUNCHER" in line and self.name in line for line in text.splitlines())
        assert named, f"no file of the job sets NXDT_LAUNCHER to {self.name!r}, so that no process would ask it"

    def _assert_has(self, submission: Submission, words: Sequence[str]) -> None:
        texts = list(_strings(submission))
        for word in words:
            if " " in word:
                found = any(text == word or any(f"{quote}{word}" in text for quote in "'\"") for text in texts)
            else:
                found = any(word in text for text in texts)
            assert found, (
                f"no file has the argument {word!r}"
                + (" as one word: quote it, as shlex.join does" if " " in word else "")
                + f"; the job calls: nxdt {' '.join(words)}"
            )


def _places(factory: Callable[[], Launcher], environments: Sequence[Mapping[str, str]]) -> list[Place]:
    assert len(environments) == _NODES * _DEVICES, (
        f"the fixture 'environments' must have the variables of {_NODES * _DEVICES} processes"
    )
    places = []
    for rank, variables in enumerate(environments):
        place = factory().join(variables)
        assert isinstance(place, Place), f"join must return the Place of rank {rank}; it returned {place!r}"
        places.append(place)
    return places


def _damaged(variables: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what is wrong with a set of variables, and the set."""
    for name in variables:
        yield f"no {name}", {each: value for each, value in variables.items() if each != name}
        for value in _NONSENSE:
            yield f"{name}={value!r}", {**variables, name: value}


def _strings(submission: Submission) -> Iterator[str]:
    """Yield the texts of the files, and every string in those that are YAML or JSON."""
    for text in submission.files.values():
        yield text
        try:
            trees = list(yaml.safe_load_all(text))
        except yaml.YAMLError:
            continue
        for tree in trees:
            if not isinstance(tree, str):
                yield from _leaves(tree)


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (Mapping, list)):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(each)


def _name(factory: Callable[[], Launcher]) -> str:
    return getattr(factory, "__name__", repr(factory))
