"""Links, pipes and directories where a run writes its files: it writes through none of them and waits for none."""

import shutil

import pytest
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.distributed.environment import find_place
from nxdt_core.errors.training import CannotCopyFile, CannotWriteRunDirectory
from nxdt_core.launch.supervision.heartbeat import write_stacks
from nxdt_core.run import train
from nxdt_core.run.callbacks.monitor import mark_failed
from tests.in_the_way import KINDS, PRECIOUS, put
from tests.train.small import SMALL

WRITTEN = ("config.yaml", "cmd-args.log", "metrics.replaced.jsonl", "metrics.jsonl")


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
            with raises(CannotWriteRunDirectory, match=r"cmd-args\.log: Is a directory"):
                train(used)
            (used.run_dir / "cmd-args.log").rmdir()
            assert (used.run_dir / name).is_file()
            assert not (used.run_dir / name).is_symlink()
        else:
            with raises(CannotWriteRunDirectory) as caught:
                train(used)
            assert f"{name}: " in str(caught.value)
            assert KINDS[kind] in str(caught.value)
            (used.run_dir / name).unlink(missing_ok=True)
        assert precious.read_text() == PRECIOUS
    assert train(used).step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_not_written_through_what_stands_in_its_place(used, tmp_path, capsys, kind):
    log = used.run_dir / "logs" / "globalrank-0_localrank-0.txt"
    precious = put(kind, log, tmp_path)
    assert train(used).step == 3
    assert precious.read_text() == PRECIOUS
    said = capsys.readouterr().err
    assert said.count(f"The log {log} is incomplete: ") == 1
    assert KINDS[kind] in said


def test_a_copied_file_replaces_a_link_and_a_pipe_is_not_copied(small_run, tmp_path):
    names = {"link": "notes.txt", "hard link": "more.txt"}
    for name in names.values():
        (tmp_path / name).write_text("mine")
    copied = ",".join(str(tmp_path / name) for name in names.values())
    config = small_run("trainer.max_steps=1", f"exp_manager.files_to_copy=[{copied}]")
    (config.run_dir / "files").mkdir(parents=True)
    precious = [put(kind, config.run_dir / "files" / name, tmp_path) for kind, name in names.items()]
    train(config)
    assert [each.read_text() for each in precious] == [PRECIOUS] * 2
    assert [(config.run_dir / "files" / name).read_text() for name in names.values()] == ["mine"] * 2
    put("pipe", tmp_path / "notes.txt", tmp_path)
    with raises(CannotCopyFile, match="it is a named pipe"):
        train(config)


@pytest.mark.parametrize("name", ["logs", "files", "profile"])
def test_a_link_to_a_directory_is_no_directory_of_a_run(small_run, tmp_path, name):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "theirs").mkdir()
    config = small_run(
        "trainer.max_steps=1", f"exp_manager.files_to_copy=[{tmp_path / 'notes.txt'}]", "trainer.profiler=simple"
    )
    config.run_dir.mkdir()
    (config.run_dir / name).symlink_to(tmp_path / "theirs")
    with raises(CannotWriteRunDirectory, match=rf"{name}: it is a symbolic link, not a directory"):
        train(config)
    assert not list((tmp_path / "theirs").iterdir())


def test_the_directories_of_a_run_and_of_its_checkpoints_may_be_links(small_run, tmp_path):
    config = small_run("trainer.max_steps=1")
    (tmp_path / "volume" / "checkpoints").mkdir(parents=True)
    (tmp_path / "volume" / "run").mkdir()
    config.run_dir.symlink_to(tmp_path / "volume" / "run")
    (config.run_dir / "checkpoints").symlink_to(tmp_path / "volume" / "checkpoints")
    assert train(config).step == 1
    assert (tmp_path / "volume" / "checkpoints" / "step-00000001" / "manifest.json").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_is_not_written_through_what_stands_in_its_place(small_run, tmp_path, kind):
    config = small_run("trainer.max_steps=1", "trainer.profiler=simple")
    (config.run_dir / "profile" / "rank-00000").mkdir(parents=True)
    precious = put(kind, config.run_dir / "profile" / "rank-00000" / "fit-profile.txt", tmp_path)
    with raises(CannotWriteRunDirectory, match=rf"fit-profile\.txt: .*{KINDS[kind]}"):
        train(config)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("kind", KINDS)
def test_the_launcher_does_not_open_what_stands_in_the_place_of_the_state(small_run, tmp_path, kind):
    files = ["exp_manager.monitoring.health_file=health.json", "exp_manager.monitoring.metrics_file=run.prom"]
    config = small_run(*files)
    config.run_dir.mkdir()
    for name in ("health.json", "run.prom"):
        precious = put(kind, config.run_dir / name, tmp_path)
        mark_failed(config, "NXDT")
        assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("content", ["[]", "{}", "null", "[" * 100_000, '{"state": ["running"], "error": 1}'])
def test_the_launcher_survives_a_state_that_another_program_wrote(small_run, content):
    config = small_run("exp_manager.monitoring.health_file=health.json")
    config.run_dir.mkdir()
    (config.run_dir / "health.json").write_text(content)
    mark_failed(config, "[NXDT-P048]")
    assert (config.run_dir / "health.json").read_text() == content


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_not_written_through_what_stands_in_their_place(tmp_path, kind):
    (tmp_path / "stacks").mkdir()
    precious = put(kind, tmp_path / "stacks" / "rank-00000.txt", tmp_path)
    assert write_stacks(tmp_path, find_place()) == ""
    assert precious.read_text() == PRECIOUS
    (tmp_path / "stacks").rename(tmp_path / "theirs")
    (tmp_path / "stacks").symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs" / "rank-00000.txt").unlink()
    assert write_stacks(tmp_path, find_place()) == ""
    assert not list((tmp_path / "theirs").iterdir())
