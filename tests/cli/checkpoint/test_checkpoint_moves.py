"""``nxdt checkpoint copy`` and ``prune``."""

import json
import os
import pty
import sys
from pathlib import Path

import pytest

from nxdt_core.checkpoint import list_checkpoints, open_storage, own
from tests import processes


@pytest.fixture
def good(nxdt, store, tmp_path):
    """Address of a store with the steps 10 and 40, both good."""
    for step in (20, 30):
        _delete(store, step)
    storage = open_storage(store)
    from nxdt_core.checkpoint import CheckpointFacts
    from tests.checkpoint.saving import save_checkpoint

    save_checkpoint(storage, step=40, model={}, optimizer={}, state={}, facts=CheckpointFacts())
    return store


def _delete(store, step):
    from nxdt_core.checkpoint import delete_step

    delete_step(open_storage(store), step)


def steps(uri):
    return [status.step for status in list_checkpoints(open_storage(str(uri)))]


def tree(uri):
    """Bytes by path; who wrote there last is no part of it."""
    files = (path for path in Path(uri).rglob("*") if path.is_file() and not path.name.startswith(".nxdt-lock-"))
    return {path.relative_to(uri): path.read_bytes() for path in files}


def test_copy_takes_all_committed_steps_and_repeats_nothing(nxdt, good, tmp_path):
    first = json.loads(nxdt("checkpoint", "copy", good, str(tmp_path / "to"), "--json").stdout)
    assert tree(tmp_path / "to") == tree(good)
    assert [list(row) for row in first] == [
        ["step", "uri", "was_committed", "files", "files_copied", "bytes_copied", "bytes_kept"]
    ] * 2
    assert [(row["step"], row["was_committed"], row["bytes_kept"]) for row in first] == [
        (40, False, 0),
        (10, False, 0),
    ]
    again = nxdt("checkpoint", "copy", good, str(tmp_path / "to"))
    assert again.stdout.splitlines() == ["Step 40 is already there.", "Step 10 is already there."]


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("", ("--steps", "newest"), [40]),
        ("", ("--steps", "10"), [10]),
        ("", ("--steps", "10,40"), [10, 40]),
        ("/step-00000010", (), [10]),
        ("/step-00000010/", (), [10]),
    ],
)
def test_copy_of_chosen_steps(nxdt, good, tmp_path, source, options, expected):
    assert nxdt("checkpoint", "copy", good + source, str(tmp_path / "to"), *options).returncode == 0
    assert steps(tmp_path / "to") == expected


def test_copy_says_nothing_on_standard_error_where_no_terminal_is(nxdt, good, tmp_path):
    done = nxdt("checkpoint", "copy", good, str(tmp_path / "to"))
    assert done.stderr == ""
    assert done.stdout.startswith("Copied step 40 at ")


def test_copy_mends_what_the_destination_lost(nxdt, good, tmp_path, shard_of):
    nxdt("checkpoint", "copy", good, str(tmp_path / "to"))
    shard_of(tmp_path / "to", 10).unlink()
    assert nxdt("checkpoint", "copy", good, str(tmp_path / "to")).stdout.splitlines()[1].startswith("Repaired step 10")
    assert tree(tmp_path / "to") == tree(good)


def test_copy_refuses_a_damaged_source(nxdt, store, tmp_path):
    done = nxdt("checkpoint", "copy", store, str(tmp_path / "to"))
    assert done.returncode == 2
    assert "[NXDT-S010]" in done.stderr
    assert f"{store}/step-00000020" in done.stderr
    assert "committed" not in [status.state for status in list_checkpoints(open_storage(str(tmp_path / "to")))]


def test_copy_onto_another_checkpoint_of_the_step_is_refused(nxdt, good, store, tmp_path):
    from nxdt_core.checkpoint import CheckpointFacts
    from tests.checkpoint.saving import save_checkpoint

    to = str(tmp_path / "to")
    save_checkpoint(open_storage(to), step=10, model={}, optimizer={}, state={}, facts=CheckpointFacts())
    before = tree(to)
    done = nxdt("checkpoint", "copy", f"{good}/step-00000010", to)
    assert done.returncode == 2
    assert done.stderr.startswith(f"[NXDT-S060] {to}/step-00000010 holds another checkpoint of that step")
    assert tree(to) == before


def test_copy_onto_another_step_is_refused(nxdt, good, tmp_path):
    done = nxdt("checkpoint", "copy", f"{good}/step-00000010", str(tmp_path / "to" / "step-00000011"))
    assert done.returncode == 2
    assert "[NXDT-S061]" in done.stderr
    assert nxdt("checkpoint", "copy", f"{good}/step-00000010", f"{tmp_path}/to/step-00000010").returncode == 0
    assert steps(tmp_path / "to") == [10]


def test_copy_of_a_step_that_is_not_there_names_those_that_are(nxdt, good, tmp_path):
    for arguments in ((good, "--steps", "11"), (f"{good}/step-00000011",)):
        done = nxdt("checkpoint", "copy", *arguments, str(tmp_path / "to"))
        assert done.returncode == 2
        assert "[NXDT-S011]" in done.stderr
        assert "10, 40" in done.stderr
    assert nxdt("checkpoint", "copy", good, str(tmp_path / "to"), "--steps", "some").returncode == 2


def test_prune_says_what_it_deletes_and_keeps(nxdt, good):
    done = nxdt("checkpoint", "prune", good, "--keep-last", "1", "--dry-run")
    assert done.stdout.splitlines() == ["Keeps step 40.", "Would delete step 10."]
    assert steps(good) == [10, 40]
    done = nxdt("checkpoint", "prune", good, "--keep-last", "1")
    assert done.stdout.splitlines() == ["Keeps step 40.", "Deletes step 10."]
    assert steps(good) == [40]
    assert nxdt("checkpoint", "prune", good, "--keep-last", "1").stdout.splitlines()[1] == "Deletes nothing."


def test_prune_json(nxdt, good):
    arguments = ("checkpoint", "prune", good, "--keep-last", "1", "--json")
    assert json.loads(nxdt(*arguments, "--dry-run").stdout) == {"keep": [40], "delete": [10], "deleted": False}
    assert json.loads(nxdt(*arguments).stdout) == {"keep": [40], "delete": [10], "deleted": True}
    assert steps(good) == [40]


def test_prune_never_deletes_the_last_good_one(nxdt, store):
    """Step 20, the newest committed one, has a flipped byte."""
    done = nxdt("checkpoint", "prune", store, "--keep-last", "1")
    assert done.stdout.splitlines() == ["Keeps steps 10, 20.", "Deletes nothing."]
    assert steps(store) == [10, 20, 30]
    _delete(store, 10)
    done = nxdt("checkpoint", "prune", store, "--keep-last", "1")
    assert done.returncode == 2
    assert "[NXDT-S062]" in done.stderr
    assert steps(store) == [20, 30]


def test_prune_refuses_less_than_one_and_single_steps(nxdt, good):
    assert nxdt("checkpoint", "prune", good, "--keep-last", "0").returncode == 2
    assert nxdt("checkpoint", "prune", good).returncode == 2
    assert "names one step" in nxdt("checkpoint", "prune", f"{good}/step-00000010", "--keep-last", "1").stderr
    assert "[NXDT-S011]" in nxdt("checkpoint", "prune", f"{good}/../nowhere", "--keep-last", "1").stderr
    assert steps(good) == [10, 40]


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", [10, 40]), (b"y\n", [40])])
def test_prune_asks_on_a_terminal(good, answer, left):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "nxdt_core", "checkpoint", "prune", good, "--keep-last", "1"]
    child = processes.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    os.write(ours, answer)
    child.wait(timeout=60)
    os.close(ours)
    assert steps(good) == left


@pytest.mark.parametrize("verb", ["copy", "prune"])
def test_a_store_that_a_run_saves_to_is_left_alone(nxdt, good, tmp_path, verb):
    """Reading it is always possible."""
    target = good if verb == "prune" else str(tmp_path / "to")
    arguments = ("prune", good, "--keep-last", "1", "--yes") if verb == "prune" else ("copy", good, target)
    ownership = own(open_storage(target), run="llama-tiny", say=pytest.fail)
    before = tree(target)
    refused = nxdt("checkpoint", *arguments)
    assert refused.returncode == 2
    assert "[NXDT-S040]" in refused.stderr
    assert "belongs to 'llama-tiny'" in refused.stderr
    assert tree(target) == before
    assert nxdt("checkpoint", "list", good).returncode == 0
    assert nxdt("checkpoint", "prune", good, "--keep-last", "1", "--dry-run").returncode == 0
    ownership.release()
    assert nxdt("checkpoint", *arguments).returncode == 0
    assert steps(target) == ([40] if verb == "prune" else [10, 40])
