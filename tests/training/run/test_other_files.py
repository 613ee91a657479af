"""Links, pipes and directories where a run writes its files: it writes through none of them and waits for none."""

import os
import shutil

import pytest

from nxdt_core.config import load
from nxdt_core.errors.training import CannotCopyFile, CannotWriteRunDirectory
from nxdt_core.training import train
from tests.training.small import SMALL

WRITTEN = ("config.yaml", ".config.yaml.part", "cmd-args.log", ".metrics.jsonl.kept", "metrics.jsonl")
KINDS = {"link": "it is a symbolic link", "hard link": "another name", "pipe": "it is a named pipe"}


def put(kind, path, tmp_path):
    """Make something else of ``path``, and return the file that a link leads to."""
    path.unlink(missing_ok=True)
    precious = tmp_path / "precious.txt"
    precious.write_text("of somebody else")
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    return precious


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Directory of a run of two steps, of which the second is not committed."""
    where = tmp_path_factory.mktemp("two")
    saves = ("checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=-1", "trainer.max_steps=2")
    train(load("recipe:llama-tiny", [*SMALL, f"exp_manager.exp_dir={where}", "name=run", *saves]))
    (where / "run" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    return where / "run"


@pytest.fixture
def used(small_run, two_steps):
    """A run that resumes a copy of it from the first step."""
    config = small_run("trainer.max_steps=3", "checkpoint.resume_if_exists=true")
    shutil.copytree(two_steps, config.run_dir)
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_through_what_stands_in_the_place_of_a_file(used, tmp_path, kind):
    for name in WRITTEN:
        precious = put(kind, used.run_dir / name, tmp_path)
        if name == "config.yaml":  # it is replaced whole, and what was there is not opened to write
            (used.run_dir / "cmd-args.log").unlink()
            (used.run_dir / "cmd-args.log").mkdir()
            with pytest.raises(CannotWriteRunDirectory, match=r"cmd-args\.log: Is a directory"):
                train(used)
            (used.run_dir / "cmd-args.log").rmdir()
            assert (used.run_dir / name).is_file()
            assert not (used.run_dir / name).is_symlink()
        else:
            with pytest.raises(CannotWriteRunDirectory) as caught:
                train(used)
            assert f"{name}: " in str(caught.value)
            assert KINDS[kind] in str(caught.value)
            (used.run_dir / name).unlink(missing_ok=True)
        assert precious.read_text() == "of somebody else"
    assert train(used).step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_not_written_through_what_stands_in_its_place(used, tmp_path, capsys, kind):
    log = used.run_dir / "logs" / "globalrank-0_localrank-0.txt"
    precious = put(kind, log, tmp_path)
    assert train(used).step == 3
    assert precious.read_text() == "of somebody else"
    said = capsys.readouterr().err
    assert said.count(f"The log {log} is incomplete: ") == 1
    assert KINDS[kind] in said


def test_a_copied_file_replaces_a_link_and_a_pipe_is_not_copied(small_run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    config = small_run("trainer.max_steps=1", f"exp_manager.files_to_copy=[{tmp_path / 'notes.txt'}]")
    (config.run_dir / "files").mkdir(parents=True)
    precious = put("link", config.run_dir / "files" / "notes.txt", tmp_path)
    train(config)
    assert precious.read_text() == "of somebody else"
    assert (config.run_dir / "files" / "notes.txt").read_text() == "mine"
    put("pipe", tmp_path / "notes.txt", tmp_path)
    with pytest.raises(CannotCopyFile, match="it is a named pipe"):
        train(config)
