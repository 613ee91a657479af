"""Wrong launchers, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_launcher_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import itertools
import shlex
import socket
import subprocess
from dataclasses import replace

import pytest
from nxdt_testing.launcher_contract import LauncherContract

from nxdt_core.config.section import Section
from nxdt_core.distributed.environment import read_variable, require
from nxdt_core.protocols.launcher import Launcher, RankEnvironment, Submission

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


class Options(Section):
    queue: str = "default"


@mutant
class Right(Launcher):
    def join(self, environment):
        if "MY_TASK" not in environment:
            return None
        require(environment, ("MY_TASKS", "MY_SLOT", "MY_FIRST"), reason="MY_TASK is")
        rank, world_size = read_variable(environment, "MY_TASK"), read_variable(environment, "MY_TASKS", least=1)
        return RankEnvironment(
            rank=rank,
            world_size=world_size,
            local_rank=read_variable(environment, "MY_SLOT"),
            host="here",
            master_addr=environment["MY_FIRST"],
            master_port=29500,
            launcher="Mine",
        )

    def submission(self, job, options):
        calls = [shlex.join(["nxdt", *words]) for words in (job.compile, job.train) if words]
        script = "\n".join(["#!/bin/sh", "export NXDT_LAUNCHER=mine", *calls, ""])
        return Submission(files={"job.sh": script}, command=("submit", f"--nodes={job.nodes}", "job.sh"))


@mutant
class ImportsNumpy(Right):
    """As if it were written in a module that does."""

    __module__ = "tests.testing.mutants.imports_numpy"


InheritsNothing = mutant(type("InheritsNothing", (), {**vars(Right), "submits": Right.submits}))


@mutant
class JoinsEveryProcess(Right):
    def join(self, environment):
        return super().join(environment) or RankEnvironment(host="here")


@mutant
class CountsFromOne(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, rank=place.rank + 1, world_size=place.world_size + 1)


@mutant
class KnowsOneDevice(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, local_rank=0)


@mutant
class MeetsOnItsOwnHost(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, master_addr=f"node{place.rank // 2}")


@mutant
class MeetsWhereverItRuns(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, master_addr=socket.getfqdn())


@mutant
class MeetsOnLoopback(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, master_addr="127.0.0.1")


@mutant
class DerivesNoPort(Right):
    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, master_port=0)


@mutant
class RaisesKeyError(Right):
    def join(self, environment):
        if "MY_TASK" in environment:
            environment["MY_SLOT"]
        return super().join(environment)


@mutant
class ReadsNonsenseAsInt(Right):
    def join(self, environment):
        int(environment.get("MY_TASK", 0))
        return super().join(environment)


@mutant
class WritesVariables(Right):
    def join(self, environment):
        place = super().join(environment)
        if place is not None:
            place.export()
        return place


@mutant
class CountsItsCalls(Right):
    def __init__(self):
        self.calls = itertools.count(29500)

    def join(self, environment):
        place = super().join(environment)
        return place and replace(place, attempt=str(next(self.calls)))


@mutant
class RightAndOnlyJoins(Launcher):
    join = Right.join


@mutant
class NamesFilesAbsolutely(Right):
    def submission(self, job, options):
        right = super().submission(job, options)
        return replace(right, files={str(job.directory / name): text for name, text in right.files.items()})


@mutant
class ReturnsOneWord(Right):
    def submission(self, job, options):
        right = super().submission(job, options)
        return replace(right, command=shlex.join(right.command))


@mutant
class QuotesNothing(Right):
    def submission(self, job, options):
        right = super().submission(job, options)
        return replace(right, files={name: text.replace("'", "") for name, text in right.files.items()})


@mutant
class ForgetsOverrides(Right):
    def submission(self, job, options):
        return super().submission(replace(job, train=job.train[:2]), options)


@mutant
class CompilesNothing(Right):
    def submission(self, job, options):
        return super().submission(replace(job, compile=()), options)


@mutant
class AsksForOneNode(Right):
    def submission(self, job, options):
        return super().submission(replace(job, nodes=1), options)


@mutant
class NamesByTime(Right):
    names = itertools.count()

    def submission(self, job, options):
        right = super().submission(job, options)
        return replace(right, files={f"job-{next(self.names)}.sh": text for text in right.files.values()})


@mutant
class WritesItsFiles(Right):
    def submission(self, job, options):
        right = super().submission(job, options)
        job.directory.mkdir(parents=True, exist_ok=True)
        return right


@mutant
class AsksItsScheduler(Right):
    def submission(self, job, options):
        subprocess.run(["true"], check=True)
        return super().submission(job, options)


@mutant
class IsNotAskedByItsJobs(Right):
    def submission(self, job, options):
        right = super().submission(job, options)
        lines = {name: text.replace("export NXDT_LAUNCHER=mine\n", "") for name, text in right.files.items()}
        return replace(right, files=lines)


def under_contract(made):
    class Contract(LauncherContract):
        name = "mine"

        @pytest.fixture
        def factory(self):
            return made

        @pytest.fixture
        def options(self):
            return Options()

        @pytest.fixture
        def environments(self):
            return [
                {"MY_TASK": str(rank), "MY_TASKS": "4", "MY_SLOT": str(rank % 2), "MY_FIRST": "node0"}
                for rank in range(4)
            ]

    return type(f"Test{made.__name__}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
