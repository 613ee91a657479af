"""Migrations that plugins bring: the command takes the one that is meant, and errors and notes ask all of them."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

ENTRY = """
from nxdt_core.api import MigrationComponent, hookimpl

@hookimpl
def nxdt_migrations():
    return [MigrationComponent(name="acme", target="acme_migration:Acme", program="Acme 2", summary="YAML")]
"""
MIGRATION = dedent("""
    from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, MigratedKey, Migration

    class Acme(Migration):
        def recognise(self, config):
            return "acme" if "acme" in config else ""

        def explain(self, key, known):
            if key == "acme":
                return KeyMeaning(unneeded="versions have no effect here", program="Acme")
            return KeyMeaning(name="trainer.max_steps") if key == "trainer.stop_after" else None

        def environment_note(self, environment):
            return "environment: ACME_STEPS: trainer.max_steps" if "ACME_STEPS" in environment else None

        def migrate(self, source, target, kernel, overrides):
            steps = overrides.get("trainer.stop_after", 3)
            keys = (
                MigratedKey(key="acme", line=1, verdict="unneeded", value="2", reason="it has no effect here"),
                MigratedKey(key="trainer.stop_after", line=3, verdict="renamed", target="trainer.max_steps"),
                MigratedKey(key="base", line=0, verdict="added", value="recipe:llama-tiny", reason="as large"),
            )
            text = f"base: recipe:llama-tiny\\ntrainer:\\n  max_steps: {steps}\\n"
            return MigratedConfig(source=source, target=target, program="Acme 2", text=text, keys=keys)
""")
FILE = "acme: 2\ntrainer:\n  stop_after: 3\n"


@pytest.fixture
def acme(dist, work):
    """A third party's migration, and a file of its program."""
    dist("nxdt_acme", ENTRY, acme_migration=MIGRATION)
    (work / "acme.yaml").write_text(FILE)


@pytest.mark.parametrize("words", [(), ("--from", "acme"), ("--from", "nxdt_acme:acme")])
@pytest.mark.usefixtures("acme")
def test_a_migration_of_a_third_party_is_found_and_run(nxdt, work, words):
    missing = () if words else ("torch",)  # which way to name it is taken makes no difference to what is imported
    done = nxdt("config", "migrate", "acme.yaml", "-o", "run.yaml", "--json", *words, without=missing)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["framework"] == "Acme 2"
    assert [key["verdict"] for key in found["keys"]] == ["unneeded", "renamed", "added"]
    assert (work / "run.yaml").read_text() == "base: recipe:llama-tiny\ntrainer:\n  max_steps: 3\n"


@pytest.mark.usefixtures("acme")
def test_a_file_of_its_program_is_read_as_it_writes_it(nxdt):
    done = nxdt("config", "show", "acme.yaml")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  max_steps: 3 ")]
    assert line.endswith("# acme.yaml:3")
    checked = nxdt("config", "check", "acme.yaml", "trainer.max_steps=many")
    assert "command line: trainer.max_steps: found 'many'" in checked.stderr
    shown = nxdt("config", "show", "acme.yaml", "trainer.stop_after=5").stdout.splitlines()
    assert next(line for line in shown if "max_steps: 5 " in line).endswith("# command line")
    notes = [line for line in nxdt("config", "check", "acme.yaml").stderr.splitlines() if "acme.yaml" in line]
    assert notes == [
        "note: acme.yaml: read as a file of Acme 2, as nxdt config migrate writes it: renamed 1, added 1, unneeded 1",
        "note: acme.yaml: base (recipe:llama-tiny): added; as large",
    ]


@pytest.mark.usefixtures("acme")
def test_keys_of_its_files_are_explained_on_a_command_line(nxdt):
    done = nxdt("config", "check", "recipe:llama-tiny", "acme=2", "trainer.stop_after=3")
    assert done.returncode == 2
    assert "acme: unknown key. It is a key of Acme: versions have no effect here. Leave it out." in done.stderr
    assert "trainer.stop_after: unknown key. Did you mean 'trainer.max_steps'?" in done.stderr


@pytest.mark.usefixtures("acme")
def test_a_run_starts_with_its_note_on_the_environment(nxdt):
    words = ("recipe:llama-tiny", "trainer.max_steps=1", "trainer.accelerator=cpu", "data.global_batch_size=4")
    done = nxdt("train", *words, ACME_STEPS="3")
    assert done.returncode == 0, done.stderr
    assert "note: environment: ACME_STEPS: trainer.max_steps" in done.stderr


def test_a_migration_that_cannot_be_imported_stops_nothing_else(nxdt, dist, work):
    dist("nxdt_acme", ENTRY, acme_migration="import missing_here\n")
    (work / "acme.yaml").write_text(FILE)
    done = nxdt("config", "check", "acme.yaml")
    assert done.returncode == 2
    assert "[NXDT-C001]" in done.stderr
    assert "The migration 'acme' of nxdt_acme is skipped" in done.stderr
    named = nxdt("config", "migrate", "acme.yaml", "--from", "acme", "-o", "run.yaml")
    assert "[NXDT-K006] The migration 'acme' of nxdt_acme cannot be used" in named.stderr
