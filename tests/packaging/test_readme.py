"""What the README and the documentation claim: commands parse or run, code is real, tables are whole."""

import html
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from nxdt_core.cli.app import root
from nxdt_core.config import load
from scripts.readme import SITE, filled
from scripts.terminal_picture import LOSS, PICTURE, SHOWN, loss_svg, shown
from tests import processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}


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
TINY = "train recipe:llama-tiny "


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
        elif program == "python":
            assert any(f"Save this as `{words[0]}`" in text for text in PAGES.values()), line
        elif program in ("python3", "cp"):
            assert (ROOT / next(word for word in words if not word.startswith("-"))).exists(), line
        elif program == "cd":
            assert any(f" {words[0]}" in other for other in COMMANDS if other.startswith("nxdt plugins new ")), line
        elif program == "test":
            assert words == ["$(find nxdt_experiments/llama-tiny/health.json -mmin -30)"], line
        elif program != "openssl":  # those are run by tests/checkpoint/test_signing.py
            assert (program, words[0]) == ("pip", "install"), line
            found = words[words[1:].index("--find-links") + 2] if "--find-links" in words else None
            names = [word.partition("[")[0] for word in words[1:] if word not in ("--find-links", found)]
            assert all(name in dists or (ROOT / name / "pyproject.toml").exists() for name in names), line


WHEELS = "make wheels  # in a checkout: no release is on a package index yet"
READMES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("plugins/*/*/README.md")}
OURS = re.compile(r"^(?:\$ )?(?:\S*/)?pip install .*\b(?:nxdt\b|nxdt-\w|examples/).*", re.MULTILINE)
"""A line that installs a distribution of this repository, or a plugin that needs one."""


@pytest.mark.parametrize("page", sorted({**PAGES, **READMES}.keys() - {"docs/decisions.md"}))
def test_commands_that_install_work_in_a_checkout(page):
    text = {**PAGES, **READMES}[page]
    lines = OURS.findall(text)
    assert [line for line in lines if "--find-links " not in line] == []
    assert re.findall(r"`pip install '?nxdt-[^`]*`", text) == [], "name the distribution in prose: no index has it"
    if page in READMES:
        assert len(lines) == 1, page
    if page == "README.md":
        assert "`make wheels` builds" in text.partition(lines[0])[0]
    elif lines and page != "docs/how-to/operations.md":  # there, `make wheels` is a step of its own
        assert text.partition(lines[0])[0].endswith(f"\n{WHEELS}\n"), page


def test_light_commands_of_the_documentation_run(tmp_path):
    def nxdt(*args):
        command = [sys.executable, "-m", "nxdt_core", *args]
        done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    for name in ("my_run", "my_chats"):
        (tmp_path / f"{name}.yaml").write_text(nxdt("recipes", "show", "llama-tiny"))
    light = ("nxdt plugins list", "nxdt recipes list", "nxdt config ")
    for line in (line for line in COMMANDS if line.startswith(light)):
        nxdt(*shlex.split(line)[1:])


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if f" {TINY}" in text])
def test_runs_of_a_page_have_steps_to_do_in_their_order(page):
    ends = {}
    for line in (
        line for block in blocks(PAGES[page], "sh") for line in block.splitlines() if " train recipe:" in line
    ):
        source, *words = shlex.split(line.partition(" train ")[2])
        place = [word for word in words if re.match(r"name=|checkpoint\.uri=|trainer\.max_steps=", word)]
        config = load(source, place)
        assert config.run.trainer.max_steps > ends.get(config.checkpoint_uri, 0), line
        ends[config.checkpoint_uri] = config.run.trainer.max_steps


def test_the_plugin_of_the_readme_is_light(tmp_path):
    (code,) = (code for code in blocks(README, "python") if code.startswith("# finished.py"))
    (tmp_path / "finished.py").write_text(code)
    words = [
        "config",
        "check",
        "recipe:llama-tiny",
        "plugins.local=[finished.py]",
        "trainer.callbacks=[{name: finished}]",
    ]
    command = [sys.executable, "-m", "nxdt_core", *words]
    done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_plugin_of_the_readme_is_a_callback_of_a_run(tmp_path):
    (code,) = (code for code in blocks(README, "python") if code.startswith("# finished.py"))
    (tmp_path / "finished.py").write_text(code)
    (line,) = (line for line in COMMANDS if "finished.py" in line)
    words = [sys.executable, "-m", "nxdt_core", *shlex.split(line)[1:], "trainer.max_steps=1"]
    done = processes.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Finished at step 1\n" in done.stdout


def test_the_readme_is_short_and_its_tables_follow_from_the_plugins():
    assert len(README.splitlines()) <= 150
    assert filled(README) == README, "run python scripts/readme.py"


def masked(line):
    """A line without what differs between machines and runs: numbers, and the spaces that align them."""
    return re.sub(r"\d[\d.,]*(?:e-?\d+)?[kM]?| +", "#", line)


@pytest.mark.parametrize("command", SHOWN)
def test_the_picture_shows_what_the_commands_print(command, tmp_path):
    lines = [html.unescape(line) for line in re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text())]
    assert [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] == list(SHOWN)
    start = lines.index(f"$ {command}") + 1
    found = shown(command, SHOWN[command], tmp_path, processes.run)
    there = lines[start : start + len(found)]
    if " train " in command:  # of which losses and times differ
        found, there = ([masked(line) for line in each] for each in (found, there))
    assert found == there, "run python scripts/terminal_picture.py"


def test_the_picture_of_the_demo_has_both_losses_and_is_read_on_light_and_dark_pages(tmp_path):
    rows = [{"step": step, "loss": 4 / step} for step in (10, 20, 30)]
    for name, part in (("metrics", rows), ("validation", rows[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    written, drawn = LOSS.read_text(), loss_svg(tmp_path)
    for picture in (written, drawn):
        ElementTree.fromstring(picture)
    style = r"<svg[^>]*><style>.*?</style>"
    assert re.findall(style, written, re.DOTALL) == re.findall(style, drawn, re.DOTALL), "write it from a demo again"
    assert [len(points.split()) for points in re.findall(r'points="(.*?)"', drawn)] == [3, 2]
    assert [len(points.split()) for points in re.findall(r'points="(.*?)"', written)] == [30, 3]


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page):
    folder = (ROOT / page).parent
    assert page != "README.md" or not re.findall(r"\]\((?!https://)", PAGES[page]), "a package index has no files"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[page]):
        if target.startswith(f"{SITE}/"):
            assert (ROOT / target.removeprefix(f"{SITE}/")).exists(), target
        if "://" not in target and "reference/" not in target:
            assert (folder / target).exists(), target


def _projects():
    return [
        *(ROOT / each / "pyproject.toml" for each in (".", "meta", "testing")),
        *ROOT.glob("plugins/*/*/pyproject.toml"),
    ]
