"""What the README and the documentation claim: commands parse or run, code is real, tables are whole."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from nxdt_core.cli.app import root

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
EXAMPLE = ROOT / "examples" / "third_party"


def blocks(text, language):
    """Contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


COMMANDS = sorted(
    {
        re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)  # variables before a command
        for text in PAGES.values()
        for block in blocks(text, "sh")
        for line in block.splitlines()
        if line.strip()
    }
)


LAUNCHERS = ("torchrun ", "srun ")


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith(("nxdt ", *LAUNCHERS))])
def test_commands_of_the_documentation_parse(line):
    words = shlex.split(line.partition(" > ")[0])
    words = words[1 + next(i for i, word in enumerate(words) if word in ("nxdt", "nxdt_core")) :]
    context, command = click.Context(root, info_name="nxdt"), root
    while isinstance(command, click.Group):
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, name
    command.make_context(line, words)


def test_every_other_command_is_one_that_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    dists = {tomllib.loads(path.read_text())["project"]["name"] for path in _projects()}
    for line in (line for line in COMMANDS if not line.startswith(("nxdt ", *LAUNCHERS))):
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert {word for word in words if not re.match("[A-Z]+=", word)} <= targets, line
        elif program == "python3":
            assert (ROOT / words[0]).is_file(), line
        elif program != "openssl":  # those are run by tests/checkpoint/test_signing.py
            assert (program, words[0]) == ("pip", "install"), line
            names = [word.partition("[")[0] for word in words[1:]]
            assert all(name in dists or (ROOT / name / "pyproject.toml").exists() for name in names), line


def test_light_commands_of_the_documentation_run(tmp_path):
    def nxdt(*args):
        command = [sys.executable, "-m", "nxdt_core", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    (tmp_path / "my_run.yaml").write_text(nxdt("recipes", "show", "llama-tiny"))
    light = ("nxdt plugins list", "nxdt recipes list", "nxdt config ")
    for line in (line for line in COMMANDS if line.startswith(light)):
        nxdt(*shlex.split(line)[1:])


@pytest.mark.parametrize("code", [code for code in blocks(README, "python") if "import" in code.splitlines()[0]])
def test_programs_of_the_readme_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("language", ["python", "yaml", "toml"])
def test_excerpts_of_the_plugin_are_its_files(language):
    for block in blocks(README, language):
        first, _, rest = block.partition("\n")
        if first.startswith("# src/"):
            assert rest.strip("\n") in (EXAMPLE / first.removeprefix("# ")).read_text(), first
        elif language == "toml":
            assert block in (EXAMPLE / "pyproject.toml").read_text()


def test_the_table_of_plugins_is_whole():
    listed = set(re.findall(r"^\| `([a-z0-9-]+)` \|", README, flags=re.MULTILINE))
    assert listed == {tomllib.loads(path.read_text())["project"]["name"] for path in _projects()}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[page]):
        if "://" not in target and not target.startswith("reference/"):
            assert (folder / target).exists(), target


def _projects():
    return [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/*/pyproject.toml")]
