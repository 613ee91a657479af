"""What lies in a run's directory beside figures and checkpoints: logs of each rank, commands, copied files."""

import json
import re
import sys

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.config import load
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.training import CannotCopyFile, StepNotFinite
from nxdt_core.run import train
from tests import processes
from tests.sampling import slow
from tests.train.ema_run import averaged_run
from tests.train.small import SMALL

TWO = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "trainer.max_steps=2")


def logs(run_dir):
    """Text by name."""
    return {path.name: path.read_text() for path in (run_dir / "logs").iterdir()}


def test_a_log_has_what_the_console_said_and_what_was_warned_of(small_run, capsys):
    config = small_run("trainer.max_steps=2", "checkpoint.monitor=nonsense", "checkpoint.mode=min")
    train(config)
    (text,) = logs(config.run_dir).values()
    assert re.search(r"INFO rank 0 nxdt_core\S*: step 1/2  loss", text)
    assert "WARNING rank 0 nxdt_core.run.callbacks.checkpoints: step 2 has no metric 'nonsense'" in text
    assert "step 1/2  loss" in capsys.readouterr().err


def test_a_run_that_another_file_resumes_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keys = (*SMALL, "checkpoint.resume_if_exists=true", f"exp_manager.exp_dir={tmp_path}")
    for file in ("one.yaml", "other.yaml"):
        (tmp_path / file).write_text("base: recipe:llama-tiny\nname: shared\n")
    told = "this resumes the run of one.yaml; set name to give other.yaml a run with its own directory"

    def said(source, steps):
        train(load(source, [*keys, f"trainer.max_steps={steps}"]))
        return capsys.readouterr().err

    for source, steps, expected in (
        ("one.yaml", 1, False),
        (str(tmp_path / "one.yaml"), 2, False),
        ("one.yaml", 3, False),
        ("other.yaml", 4, True),
        ("other.yaml", 5, False),
        ("shared/config.yaml", 6, False),
    ):
        assert (told in said(source, steps)) == expected, source


def test_what_ends_a_run_is_in_its_logs(small_run):
    config = small_run("trainer.max_steps=2", "model.optim.lr=1e30", "trainer.gradient_clip_val=null")
    with pytest.raises(StepNotFinite):
        train(config)
    found = logs(config.run_dir)
    assert set(found) == {"globalrank-0_localrank-0.txt", "errors.txt"}
    assert all("ERROR rank 0 nxdt_core: [NXDT-T010]" in text for text in found.values())
    assert "Traceback" not in found["errors.txt"], "a mistake of the user is no bug"


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        slow("name=run", {"globalrank-0_localrank-0.txt", "globalrank-1_localrank-1.txt"}),  # as the next test shows
        slow("exp_manager.log_local_rank_0_only=true", {"globalrank-0_localrank-0.txt"}),
        slow("exp_manager.log_global_rank_0_only=true", {"globalrank-0_localrank-0.txt"}),
    ],
)
def test_which_ranks_keep_a_log(tmp_path, override, kept):
    RankPool(2).run(warned_run, str(tmp_path), *TWO, override, timeout_s=120)
    assert set(logs(tmp_path / "run")) == kept


def warned_run(where, *overrides):
    """A run in which every rank has something to write down."""
    import importlib
    import logging

    module = importlib.import_module("nxdt_core.run.training")
    fit = module.fit

    def warning_fit(run):
        logging.getLogger("nxdt_core.tests").warning("seen")
        fit(run)

    module.fit = warning_fit
    return averaged_run(where, *overrides)


@pytest.mark.slow  # its subject is how often a line is printed
def test_what_every_rank_is_warned_of_is_printed_once(tmp_path):
    """Chats that are too long: each rank reads them all."""
    data = ("data.seq_length=64", "data.packing=false", "data.truncation=drop", "data.global_batch_size=8")
    ends = ("trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_steps=1", "trainer.val_check_interval=null")
    done = processes.run(
        [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny-sft", *data, *ends, "name=run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("train data: ") == 1
    kept = logs(tmp_path / "nxdt_experiments" / "run")
    names = ("globalrank-0_localrank-0.txt", "globalrank-1_localrank-1.txt")
    assert {name: text.count("train data: ") for name, text in kept.items()} == dict.fromkeys(names, 1)


def test_a_log_for_each_node_and_for_the_run_exclude_each_other(small_run):
    with pytest.raises(ConfigError, match="it wants a log of each node"):
        small_run(
            "trainer.max_steps=1", "exp_manager.log_local_rank_0_only=true", "exp_manager.log_global_rank_0_only=true"
        )


def test_each_start_writes_its_command_and_copies_the_files(small_run, tmp_path):
    (tmp_path / "notes.md").write_text("first")
    files = f"exp_manager.files_to_copy=['{tmp_path}/notes.md']"
    config = small_run("trainer.max_steps=1", files)
    train(config)
    (tmp_path / "notes.md").write_text("second")
    train(small_run("trainer.max_steps=2", files))
    assert (config.run_dir / "files" / "notes.md").read_text() == "second"
    assert len((config.run_dir / "cmd-args.log").read_text().splitlines()) == 2


@pytest.mark.parametrize(("names", "reason"), [(["absent.md"], "No such file"), (["a/x", "b/x"], "the same name")])
def test_a_file_that_cannot_be_copied_is_named(small_run, tmp_path, names, reason):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_text("")
    files = ", ".join(f"'{tmp_path}/{name}'" for name in names)
    with raises(CannotCopyFile, match=reason):
        train(small_run("trainer.max_steps=1", f"exp_manager.files_to_copy=[{files}]"))


def test_a_directory_of_the_time_and_the_command_that_goes_on_there(small_run, tmp_path):
    config = small_run(
        "trainer.max_steps=1", "exp_manager.use_datetime_version=true", "checkpoint.resume_if_exists=false"
    )
    summary = train(config)
    version = summary.run_dir.name
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", version)
    assert summary.checkpoint.startswith(str(tmp_path / "run" / version / "checkpoints"))
    assert f"exp_manager.version={version}" in summary.resume_command
    again = small_run("trainer.max_steps=2", f"exp_manager.version={version}", "exp_manager.use_datetime_version=true")
    assert (train(again).step, again.run_dir) == (2, summary.run_dir)


def test_ranks_agree_on_the_time(tmp_path):
    more = ("exp_manager.use_datetime_version=true", "checkpoint.resume_if_exists=false")
    RankPool(2).run(averaged_run, str(tmp_path), *TWO, *more, timeout_s=120)
    (run_dir,) = (tmp_path / "run").iterdir()
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "metrics.jsonl", "checkpoints", "logs"}


def test_a_run_that_resumes_stays_in_its_directory(small_run):
    config = small_run("trainer.max_steps=1", "exp_manager.use_datetime_version=true")
    assert train(config).run_dir == config.run_dir


def steps_of(run_dir, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()]


def test_a_resumed_run_has_each_step_once_and_keeps_the_rows_that_it_repeats(small_run):
    """As after a crash between two checkpoints: the rows of the steps behind the last one are there, the last torn."""
    extra = ("trainer.val_check_interval=2", "trainer.limit_val_batches=1", "checkpoint.resume_if_exists=true")
    config = small_run("trainer.max_steps=4", "checkpoint.every_n_train_steps=4", *extra)
    train(config)
    lost = [json.dumps({"step": step, "loss": 9.0}) for step in (5, 6)]
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (config.run_dir / name).open("a") as file:
            file.write("\n".join(lost) + '\n{"step": 7, "lo')
    others = {"other.jsonl": '{"mine": 1}\n', "deep.jsonl": "[" * 100_000 + "\n"}
    for name, text in others.items():
        (config.run_dir / name).write_text(text)
    train(small_run("trainer.max_steps=8", "checkpoint.every_n_train_steps=4", *extra))
    assert steps_of(config.run_dir) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps_of(config.run_dir, "validation.jsonl") == [2, 4, 6, 8]
    aside = (config.run_dir / "metrics.replaced.jsonl").read_text().splitlines()
    assert aside == [*lost, '{"step": 7, "lo']
    assert {name: (config.run_dir / name).read_text() for name in others} == others
    assert not (config.run_dir / "saves.replaced.jsonl").exists()


def test_a_fresh_start_in_a_used_directory_has_its_own_rows_alone(small_run):
    for steps in (4, 2):
        config = small_run(f"trainer.max_steps={steps}", "checkpoint.enabled=false")
        train(config)
    assert steps_of(config.run_dir) == [1, 2]
    assert steps_of(config.run_dir, "metrics.replaced.jsonl") == [1, 2, 3, 4]
