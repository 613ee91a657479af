"""Tests that every configuration migration must pass; its author subclasses it once for each of some files.

Example, the whole test file of a plugin::

    from nxdt_testing.migration_contract import MigrationContract

    class TestMyMigration(MigrationContract):
        @pytest.fixture
        def factory(self):
            return MyMigration

        @pytest.fixture
        def source(self, tmp_path):
            path = tmp_path / "theirs.yaml"
            path.write_text("acme_version: 1\\nsteps: 10\\ncolour: red\\n")
            return path
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from nxdt_core.config.tree import DEFAULT, Tree
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, Migration, Verdict
from nxdt_testing.contract import ComponentContract, no_error
from nxdt_testing.processes.side_effects import assert_light, side_effects

__all__ = ["MigrationContract"]

_OURS: Mapping[str, Any] = {
    "trainer": {"max_steps": 4, "devices": 1},
    "model": {"name": "mine", "optim": {"name": "adamw", "lr": 0.1}},
    "data": {"name": "text", "seq_length": 8},
}
_UNKNOWN = "no_program.has_a_key_of_this_name"
_MOVED = ("mapped", "renamed", "changed")
_LOST = ("ignored", "unsupported")


class MigrationContract(ComponentContract):
    """The tests of a migration: subclass it and override the fixtures ``factory`` and ``source``."""

    @pytest.fixture
    def source(self) -> Path:
        """Return a file of the program, with as many of its keys as possible."""
        raise NotImplementedError("override the fixture 'source'")

    @pytest.fixture
    def migrated(self, factory: Callable[[], Migration], source: Path, tmp_path: Path) -> MigratedConfig:
        """Return the migration of the file."""
        return factory().migrate(source, tmp_path / "ours.yaml", Kernel.start(), {})

    def test_it_is_a_migration(self, factory: Callable[[], Migration]) -> None:
        """It is made without arguments, and inherits from the base class."""
        assert isinstance(factory(), Migration), "inherit from nxdt_core.protocols.migration.Migration"

    def test_its_module_imports_nothing_heavy(self, factory: Callable[[], Migration]) -> None:
        """`nxdt train` asks every installed migration before torch is imported."""
        assert_light(factory.__module__)

    def test_it_recognises_its_files_and_no_others(self, factory: Callable[[], Migration], source: Path) -> None:
        """It returns a key of the file, and nothing for one of nxdt or an empty one."""
        tree = yaml.safe_load(source.read_text(encoding="utf-8"))
        key = factory().recognise(tree)
        assert isinstance(key, str), f"recognise must return text; it returned {key!r}"
        assert key, "recognise must return the key that shows whose file it is; it returned nothing"
        assert key.partition(".")[0] in tree, f"recognise returned {key!r}, which the file does not have"
        for other in ({}, _OURS):
            recognised = factory().recognise(other)
            assert recognised == "", (
                f"recognise must return '' for {dict(other)}, a file for nxdt; it returned {recognised!r}"
            )

    def test_what_another_program_wrote_is_refused(self, factory: Callable[[], Migration], tmp_path: Path) -> None:
        """A file of no program and text that is not YAML end in an error of nxdt."""
        for text in ("hello: world\n", "a: [1\n", ""):
            path = tmp_path / "other.yaml"
            path.write_text(text, encoding="utf-8")
            message = f"the file {text!r} must be refused by an NxdtError;"
            with suppress(NxdtError), no_error(message, but=NxdtError):
                migrated = factory().migrate(path, tmp_path / "out.yaml", Kernel.start(), {})
                pytest.fail(f"the file {text!r} is not one of the program, and migrate returned {migrated.text!r}")

    def test_every_key_is_accounted_for(self, migrated: MigratedConfig, source: Path) -> None:
        """With a verdict and its line; one that is lost has a reason or its value."""
        text = source.read_text(encoding="utf-8")
        lines = text.splitlines()
        rows = {row.key: row for row in migrated.keys}
        paths = set(_paths(yaml.safe_load(text)))
        for path in sorted(paths):
            ancestor = path  # a row is about a key, or about the section or list that it is in
            while ancestor and ancestor not in rows:
                ancestor = ancestor[: max(ancestor.rfind("."), ancestor.rfind("["), 0)]
            assert ancestor, f"the report says nothing of the key {path!r}"
        for row in migrated.keys:
            assert row.verdict in get_args(Verdict), f"{row.key}: {row.verdict!r} is not a verdict"
            if row.key in paths and row.line:
                name = row.key.rpartition(".")[2].partition("[")[0]
                line = lines[row.line - 1] if row.line <= len(lines) else ""
                assert name in line, f"{row.key} is said to be in line {row.line}, which is {line!r}"

    def test_the_file_has_what_the_report_says(self, migrated: MigratedConfig) -> None:
        """YAML with the keys that were kept and added, and without those that are lost."""
        tree = yaml.safe_load(migrated.text)
        assert isinstance(tree, Mapping), f"the text must be YAML with keys; it is {migrated.text!r}"
        paths = set(_paths(tree))
        for row in migrated.keys:
            place = row.target or row.key
            if row.verdict == "renamed" and not row.target:
                assert row.reason, f"{row.key} is renamed; say by which key: a target, or a reason such as 'a.b: true'"
            elif row.verdict in (*_MOVED, "added"):
                present = any(path == place or path.startswith((f"{place}.", f"{place}[")) for path in paths)
                assert present, f"{row.key} is {row.verdict}, and the file has no key {place}"
            elif row.verdict in _LOST and row.key not in {key.target for key in migrated.keys}:
                assert row.key not in paths, f"{row.key} is {row.verdict}, and the file has it nevertheless"

    def test_it_writes_nothing_and_says_the_same_again(
        self, factory: Callable[[], Migration], source: Path, tmp_path: Path
    ) -> None:
        """The caller writes the text."""
        target, kernel = tmp_path / "ours.yaml", Kernel.start()
        first = factory().migrate(source, target, kernel, {})
        with side_effects() as effects:
            again = factory().migrate(source, target, kernel, {})
        assert not effects, f"migrate must only return text; it {effects[0]}"
        assert again == first, "the same file gives another result when it is migrated again"

    def test_an_override_replaces_the_value_of_the_file(
        self, factory: Callable[[], Migration], migrated: MigratedConfig, source: Path
    ) -> None:
        """In the key of the program; a key that it does not have is left to nxdt."""
        theirs = Tree.of(yaml.safe_load(source.read_text(encoding="utf-8")), DEFAULT)
        counts = (row for row in migrated.keys if row.verdict in ("mapped", "renamed") and row.line)
        row = next((row for row in counts if type(theirs.get(row.key)) is int), None)
        if row is None:
            return
        value, place = theirs.get(row.key) + 1, row.target or row.key
        changed = factory().migrate(source, migrated.target, Kernel.start(), {row.key: value, _UNKNOWN: 1})
        new_value = Tree.of(yaml.safe_load(changed.text), DEFAULT).get(place)
        assert new_value == value, f"with the override {row.key}={value}, {place} must be {value}; it is {new_value!r}"
        others = [key.key for key in changed.keys if key.key.startswith(_UNKNOWN)]
        assert not others, f"the report must not have {_UNKNOWN!r}, an override whose key the program does not have"

    def test_it_explains_its_keys_and_no_others(
        self, factory: Callable[[], Migration], migrated: MigratedConfig
    ) -> None:
        """A key that was renamed has its name here, or nothing is said of it."""
        explanation = factory().explain(_UNKNOWN, ())
        assert explanation is None, (
            f"explain must return None for {_UNKNOWN!r}, which no program has; it returned {explanation}"
        )
        for row in migrated.keys:
            if row.verdict == "renamed":
                meaning = factory().explain(row.key, (row.target,))
                assert meaning is None or isinstance(meaning, KeyMeaning), (
                    f"explain must return a KeyMeaning or None; it returned {meaning!r} for {row.key}"
                )
                complete = meaning is None or bool(meaning.name) != bool(meaning.unneeded)
                assert complete, f"{meaning} of {row.key} must have either a name or a reason why it is not needed"

    def test_it_says_nothing_of_an_environment_without_its_variables(self, factory: Callable[[], Migration]) -> None:
        """`nxdt train` prints the note."""
        note = factory().environment_note({"HOME": "/home/someone", "PATH": "/bin"})
        assert note is None, f"environment_note must return None without variables of the program; it returned {note!r}"


def _paths(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values and of empty sections."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _paths(value, f"{path}.{key}".lstrip("."))
    elif path:
        yield path
