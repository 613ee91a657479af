"""Files that commands write: a link or a pipe in their place costs nobody a file, and no command waits for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.in_the_way import KINDS, PRECIOUS, put

OLD = Path(__file__).parents[2] / "plugins/migration/nxd/tests/published/llama3_8b_sft.yaml"
WHOLE = {
    "plot": ("run/loss.png", ("plot", "run")),
    "plot to a name": ("run/loss.svg", ("plot", "run", "-o", "run/loss.svg")),
    "launch": ("job/job.sh", ("launch", "local", "recipe:llama-tiny", "--nodes", "1", "--output", "job", "--force")),
    "config migrate": ("new.yaml", ("config", "migrate", str(OLD), "-o", "new.yaml", "--force")),
    "plugins lock": ("nxdt.lock", ("plugins", "lock", "nxdt.lock")),
}
"""Place of a file that is replaced whole, and the command that writes it."""
OPENED = {
    "report": ("run/report.html", ("report", "run"), "NXDT-T"),
    "launch": ("job/job.sh", ("launch", "local", "recipe:llama-tiny", "--nodes", "1", "--output", "job"), "NXDT-P11"),
}
"""Place of a file that is read or written where it is, the command, and how the code of its error begins."""


@pytest.fixture
def place(work):
    """``place(kind, name)``: put a link or a pipe there and return the file that a link leads to."""
    (work / "run").mkdir()
    (work / "job").mkdir()
    rows = [{"step": step, "loss": 5.0, "lr": 0.1, "consumed_tokens": 8 * step} for step in (1, 2)]
    (work / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return lambda kind, name: put(kind, work / name, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "command"), WHOLE.values(), ids=WHOLE)
def test_what_is_written_whole_replaces_a_link_and_a_pipe(nxdt, work, place, kind, name, command):
    precious = place(kind, name)
    done = nxdt(*command)
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == PRECIOUS
    assert (work / name).is_file()
    assert not (work / name).is_symlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "command", "code"), OPENED.values(), ids=OPENED)
def test_what_is_opened_where_it_is_must_be_a_file_with_one_name(nxdt, place, kind, name, command, code):
    precious = place(kind, name)
    done = nxdt(*command)
    assert done.returncode == 2
    assert code in done.stderr
    assert precious.read_text() == PRECIOUS


def test_the_logs_of_a_job_are_in_no_other_directory(nxdt, work, place):
    (work / "theirs").mkdir()
    (work / "job" / "logs").symlink_to(work / "theirs")
    done = nxdt("launch", "local", "recipe:llama-tiny", "--nodes", "1", "--output", "job")
    assert done.returncode == 2
    assert "NXDT-P117" in done.stderr
    assert "it is a symbolic link, not a directory" in done.stderr
