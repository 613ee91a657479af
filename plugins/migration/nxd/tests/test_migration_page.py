"""The session on the page about migration is one that was had: its commands give what stands there."""

import re
import shlex
from pathlib import Path

PAGE = (Path(__file__).parents[4] / "docs/migration.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_session_gives_what_the_page_shows(nxdt, tmp_path):
    work = tmp_path / "work"
    source, *excerpts = blocks("yaml")
    (work / "megatron_gpt.yaml").write_text(source)
    (work / "axolotl.yaml").write_text("base_model: x\ndatasets: []\n")
    for session in blocks("console"):
        command, _, wanted = session.removeprefix("$ nxdt ").partition("\n")
        done = nxdt(*shlex.split(command))
        shown, *more = wanted.split("...\n")
        assert (done.stdout + done.stderr).startswith(shown)
        assert more or done.stdout + done.stderr == shown
        if done.returncode == 0:
            written = (work / "my_run.yaml").read_text()
            assert all(excerpt in written for excerpt in excerpts)
            assert all(
                line in (work / "my_run.md").read_text() for text in blocks("text") for line in text.splitlines()
            )
            (work / "my_run.yaml").unlink()
    assert done.returncode == 2
    assert not (work / "my_run.yaml").exists()
