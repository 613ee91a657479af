"""Wrong migrations, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_migration_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import yaml
from nxdt_testing.migration_contract import MigrationContract

from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.configuration import MigrationUnknown
from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, MigratedKey, Migration

MUTANTS = []
KEYS = {"steps": "trainer.max_steps", "optimizer.lr": "model.optim.lr"}
SOURCE = "# a run\nmine_version: 1\nsteps: 10\noptimizer:\n  lr: 0.1\n  colour: red\n"


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(Migration):
    def recognise(self, config):
        return "mine_version" if "mine_version" in config else ""

    def explain(self, key, known):
        return KeyMeaning(name=KEYS[key], program="Mine") if key in KEYS else None

    def environment_note(self, environment):
        return "unset MINE_HOME" if "MINE_HOME" in environment else None

    def migrate(self, source, target, kernel, overrides):
        text = source.read_text(encoding="utf-8")
        tree = self.parsed(text)
        if not isinstance(tree, dict) or not self.recognise(tree):
            raise MigrationUnknown(source=str(source))
        ours, rows = {}, []
        for path, value in self.values(tree):
            value = overrides.get(path, value)
            line = next(
                n for n, each in enumerate(text.splitlines(), 1) if each.strip().startswith(path.split(".")[-1])
            )
            place = KEYS.get(path, "")
            verdict = "renamed" if place else "unneeded" if path == "mine_version" else "unsupported"
            rows.append(self.row(MigratedKey(key=path, line=line, verdict=verdict, target=place, value=str(value))))
            if place:
                *sections, last = place.split(".")
                section = ours
                for name in sections:
                    section = section.setdefault(name, {})
                section[last] = value
        text = yaml.safe_dump(ours)
        return MigratedConfig(source=source, target=target, program="Mine", text=text, keys=tuple(rows))

    def parsed(self, text):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return None

    def values(self, tree, path=""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from self.values(value, f"{path}{key}.")
            else:
                yield f"{path}{key}", value

    def row(self, row):
        return row


@mutant
class InheritsNothing:
    def __init__(self, *arguments):
        self.right = Right(*arguments)

    def __getattr__(self, name):
        return getattr(self.right, name)


@mutant
class ImportsNumpy(Right):
    """As if it were written in a module that does."""

    __module__ = "tests.testing.mutants.imports_numpy"


@mutant
class RecognisesSectionsOfOurs(Right):
    def recognise(self, config):
        return super().recognise(config) or ("trainer" if "trainer" in config else "")


@mutant
class SaysTrue(Right):
    def recognise(self, config):
        return "mine_version" in config


@mutant
class RaisesYAMLError(Right):
    def parsed(self, text):
        return yaml.safe_load(text)


@mutant
class MigratesAnything(Right):
    def migrate(self, source, target, kernel, overrides):
        try:
            return super().migrate(source, target, kernel, overrides)
        except NxdtError:
            return MigratedConfig(source=source, target=target, program="Mine", text="{}\n", keys=())


@mutant
class DropsKeysSilently(Right):
    def values(self, tree, path=""):
        return ((key, value) for key, value in super().values(tree, path) if not key.endswith("colour"))


@mutant
class CountsLinesFromZero(Right):
    def row(self, row):
        return replace(row, line=row.line - 1)


@mutant
class HasAVerdictOfItsOwn(Right):
    def row(self, row):
        return replace(row, verdict="moved") if row.verdict == "renamed" else row


@mutant
class ReportsAnotherPlace(Right):
    def row(self, row):
        return replace(row, target=row.target.replace("trainer", "run"))


@mutant
class WritesTheTarget(Right):
    def migrate(self, source, target, kernel, overrides):
        done = super().migrate(source, target, kernel, overrides)
        target.write_text(done.text)
        return done


@mutant
class NumbersItsResults(Right):
    made = itertools.count()

    def migrate(self, source, target, kernel, overrides):
        return replace(super().migrate(source, target, kernel, overrides), program=f"Mine {next(self.made)}")


@mutant
class ReadsNoOverrides(Right):
    def migrate(self, source, target, kernel, overrides):
        return super().migrate(source, target, kernel, {})


@mutant
class TakesEveryOverride(Right):
    def migrate(self, source, target, kernel, overrides):
        done = super().migrate(source, target, kernel, overrides)
        others = (MigratedKey(key=key, line=0, verdict="unsupported") for key in overrides if key not in KEYS)
        return replace(done, keys=(*done.keys, *others))


@mutant
class ExplainsEverything(Right):
    def explain(self, key, known):
        return KeyMeaning(name=KEYS.get(key, "trainer.max_steps"), program="Mine")


@mutant
class ExplainsByText(Right):
    def explain(self, key, known):
        return KEYS.get(key)


@mutant
class AlwaysHasANote(Right):
    def environment_note(self, environment):
        return "unset MINE_HOME"


def under_contract(made):
    class Contract(MigrationContract):
        @pytest.fixture
        def factory(self):
            return made

        @pytest.fixture
        def source(self, tmp_path):
            path = tmp_path / "theirs.yaml"
            path.write_text(SOURCE)
            return path

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
