"""What a user can get wrong, on the real command line: one message, status 2, nothing lost."""

import os
import shutil
import subprocess
import sys

import pytest

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.run import train
from nxdt_core.train import build
from tests import private_mounts
from tests.distributions import write_distribution

QUICK = ("trainer.max_steps=1", "trainer.accelerator=cpu")


@pytest.fixture
def nxdt(tmp_path, capsys):
    """Run ``nxdt train`` on the tiny recipe with overrides; returns status and standard error."""

    def run(*overrides, source="recipe:llama-tiny"):
        status = main(["train", source, *QUICK, f"exp_manager.exp_dir={tmp_path / 'runs'}", *overrides])
        return status, capsys.readouterr().err

    return run


def text(tmp_path, content, name="text.txt"):
    path = tmp_path / name
    path.write_bytes(content)
    return f"data.train_files=[{path}]"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["trainer.max_stepz=3"],
            ["NXDT-C010", "command line: trainer.max_stepz", "Did you mean 'trainer.max_steps'?"],
        ),
        (["model.name=lama"], ["NXDT-K002", "No model is called 'lama'", "Did you mean 'llama'"]),
        (["parallel_engine=jax"], ["NXDT-K002", "No engine is called 'jax'"]),
        (["data.name=sft-chat"], ["NXDT-D313", "data.chat_template", "'chatml'"]),
        (["checkpoint.uri=s3://bucket/run", "plugins.block=[s3]"], ["NXDT-K005", "s3://", "is blocked"]),
        (["checkpoint.uri=s3://Bucket/run"], ["NXDT-S107", "'Bucket'"]),
        (["data.global_batch_size=16", "data.micro_batch_size=3"], ["NXDT-C016", "16", "3"]),
        (["model.vocab_size=128"], ["NXDT-M051", "259 ids", "128 rows", "model.vocab_size"]),
        (["model.max_position_embeddings=64"], ["NXDT-C016", "128 tokens", "positions for 64"]),
        (["data.train_files=[nowhere.txt]"], ["NXDT-D001", "nowhere.txt"]),
        (["data.seq_length=4000000", "model.max_position_embeddings=4000000"], ["NXDT-D", "4000000"]),
        (["trainer.accelerator=gpu"], ["NXDT-P001", "'gpu'", "'cuda'"]),
        (["trainer.accelerator=neuron"], ["NXDT-P002", "'neuron'", "'cpu'"]),
        (["model.hidden_size=66"], ["NXDT-C019", "model.hidden_size", "multiple of num_attention_heads (4)"]),
        (
            ["distributed_strategy.tensor_model_parallel_size=2"],
            ["NXDT-C016", "1 x 1 processes do not divide into groups of TP 2"],
        ),
        (["checkpoint.resume_from=missing"], ["NXDT-S", "missing"]),
    ],
)
def test_a_mistake_is_told_in_words_with_a_code_and_status_2(nxdt, overrides, expected):
    status, said = nxdt(*overrides)
    assert status == 2
    assert [part for part in expected if part not in said] == [], said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "holds no text"), (b" \n\n ", "holds no text"), (b"abc \xff def", "UTF-8"), (b"abc", "128")],
)
def test_text_that_cannot_be_trained_on(nxdt, tmp_path, content, expected):
    status, said = nxdt(text(tmp_path, content))
    assert status == 2
    assert expected in said
    assert "NXDT-D" in said


def test_a_configuration_that_is_not_there(nxdt, tmp_path):
    (tmp_path / "run.yaml").write_text("name: x\n")
    status, said = nxdt(source=str(tmp_path / "rum.yaml"))
    assert status == 2
    assert "NXDT-C002" in said
    assert "run.yaml" in said


def test_a_broken_plugin_beside_good_ones_stops_nothing_and_is_named_when_wanted(nxdt, tmp_path, monkeypatch):
    write_distribution(
        tmp_path / "site",
        "nxdt-plugin-rotten",
        plugins={"rotten": "rotten_plugin"},
        files={"rotten_plugin.py": "raise RuntimeError('rotten to the core')"},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    status, said = nxdt("name=good")
    assert status == 0, said
    status, said = nxdt("model.name=rotten:model", "name=bad")
    assert status == 2
    assert "rotten to the core" in said


def test_a_damaged_named_checkpoint_is_refused_and_the_file_named(nxdt, tmp_path):
    assert nxdt("trainer.max_steps=1")[0] == 0
    shard = next((tmp_path / "runs").rglob("step-00000001/*/model/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    named = f"checkpoint.resume_from={shard.parents[2]}"
    status, said = nxdt(named, "name=other", "trainer.max_steps=2")
    assert status == 2
    assert shard.name in said
    assert "NXDT-S" in said


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting a small disk needs root")
def test_a_full_disk_while_saving_keeps_the_checkpoint_before(small_run, tmp_path):
    """A real file system with room for one checkpoint, in a mount namespace of its own."""
    config = small_run("trainer.max_steps=1")
    train(config)
    size = sum(p.stat().st_size for p in (config.run_dir / "checkpoints").rglob("*") if p.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    room = int(1.6 * size)
    overrides = [
        f"exp_manager.exp_dir={tmp_path / 'full'}",
        f"checkpoint.uri={disk}",
        "checkpoint.every_n_train_steps=1",
        "checkpoint.save_top_k=-1",
    ]
    words = [f"{key}={value}" for key, value in _small(config).items()]
    program = (
        "from nxdt_core.cli import main\n"
        "disk, room, *words = sys.argv[1:]\n"
        "mount('-t', 'tmpfs', '-o', f'size={room}', 'none', disk)\n"
        "print('status', main(['train', 'recipe:llama-tiny', *words, 'trainer.max_steps=3']))\n"
        "main(['checkpoint', 'list', disk, '--json'])\n"
        "sys.exit(main(['checkpoint', 'verify', '--deep', disk]))"
    )
    done = private_mounts.run(program, str(disk), str(room), *words, *overrides)
    assert "status 2" in done.stdout, done.stderr
    assert "NXDT-S" in done.stderr
    assert "Traceback" not in done.stderr
    assert '"step": 1' in done.stdout
    assert '"state": "committed"' in done.stdout
    assert done.returncode == 0, "the checkpoint before verifies"


def _small(config):
    """The overrides that made a configuration."""
    return dict(word.split("=", 1) for word in config.overrides)


def test_the_store_is_tried_before_the_first_step(nxdt, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, said = nxdt(f"checkpoint.uri={tmp_path / 'file'}")
    assert status == 2
    assert "NXDT-S" in said
    assert "step 1" not in said


def test_nothing_is_lost_when_a_resume_is_refused(nxdt, small_run):
    config = small_run("trainer.max_steps=1")
    train(config)
    store = build.storage(config)
    before = checkpoint.read_manifest(store, 1)
    with pytest.raises(Exception, match="do not fit"):
        train(small_run("trainer.max_steps=2", "model.ffn_hidden_size=128"))
    assert checkpoint.read_manifest(store, 1) == before
    assert checkpoint.verify(store, 1) == []


@pytest.mark.slow
def test_a_full_disk_while_logging_is_told_in_words(tmp_path):
    """A limit on the size of files stands for the disk: the record of a long run outgrows it."""
    words = [*QUICK[1:], "trainer.max_steps=200", "checkpoint.enabled=false", f"exp_manager.exp_dir={tmp_path}"]
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *words, "data.global_batch_size=2"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 14; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "NXDT-T007" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option",
    [("--temperature", "nan"), ("--temperature", "inf"), ("--seed", "99999999999999999999999"), ("--seed", "-1")],
)
def test_odd_numbers_for_generate_are_refused_before_anything_is_loaded(option, capsys):
    assert main(["generate", "nowhere", "hi", *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_a_tiny_temperature_is_greedy(small_run):
    from nxdt_core.train.generate import Sampling, load_model

    config = small_run("trainer.max_steps=1")
    train(config)
    model = load_model(config.checkpoint_uri)
    prompt, samplings = model.prompt("In"), [Sampling(max_new_tokens=5, temperature=t) for t in (0.0, 1e-300)]
    greedy, cold = ("".join(model.writer.pieces(prompt, sampling)) for sampling in samplings)
    assert greedy == cold
