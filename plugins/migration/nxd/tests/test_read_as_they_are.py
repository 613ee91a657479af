"""Files of other programs that a command reads: they are what ``nxdt config migrate`` writes, and a note says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.config.migration import migrate
from nxdt_core.errors.configuration import ConfigError
from tests.sampling import slow_except

HERE = Path(__file__).parent
FILES = {path.stem: path for path in sorted([*HERE.glob("published/*.yaml"), *HERE.glob("files/*.yaml")])}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32, "hidden_size": 4096,
    "max_position_embeddings": 8192,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
SMALL = (
    "trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=1",
    "distributed_strategy.tensor_model_parallel_size=1", "distributed_strategy.pipeline_model_parallel_size=1",
    "data.name=text", "data.train_files=['package://nxdt_plugin_text/data/kjv.txt']", "data.tokenizer.library=byte",
    "data.seq_length=16", "data.global_batch_size=2", "model.vocab_size=272", "model.num_layers=1",
    "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2", "model.num_kv_heads=1",
    "model.max_position_embeddings=16", "model.model_config=null", "precision.type=fp32", "name=run",
)  # fmt: skip


def set_paths(folder: Path, done) -> list[str]:
    """Overrides for everything that a report calls still to be set."""
    (folder / "config.json").write_text(json.dumps(MIXTRAL if "name: mixtral" in done.text else LLAMA))
    values = {"model.model_config": folder / "config.json", "model.vocab_size": 32000}
    return [f"{key}={values.get(key, folder)}" for key, _ in done.to_set]


@pytest.mark.parametrize(
    "name", slow_except(FILES, ("llama3_8b_sft", "mixtral_8x7b_pretrain", "nemo_gpt", "nnm_llama"))
)
def test_a_file_is_what_its_migration_is(name, installed, tmp_path):
    done = migrate(FILES[name], tmp_path / "new.yaml", None, installed)
    done.target.write_text(done.text)
    overrides = set_paths(tmp_path, done)
    read = config.load(FILES[name], overrides, kernel=installed)
    assert read.to_values() == {**config.load(done.target, overrides, kernel=installed).to_values()}
    told, *lines = [note for note in read.notes if note.startswith(str(FILES[name]))]
    counts = {verdict: sum(row.verdict == verdict for row in done.keys) for verdict in ("mapped", "renamed", "added")}
    assert all(f"{verdict} {count}" in told for verdict, count in counts.items() if count)
    assert len(lines) == sum(row.verdict in ("changed", "added", "ignored", "unsupported") for row in done.keys)


def test_values_have_the_lines_of_the_file_under_the_names_of_today(installed, tmp_path):
    source = FILES["llama3_8b_pretrain"]
    done = migrate(source, tmp_path / "new.yaml", None, installed)
    origins = config.load(source, set_paths(tmp_path, done), kernel=installed).origins
    line = next(n for n, text in enumerate(source.read_text().splitlines(), 1) if "resume_if_exists" in text)
    assert str(origins["checkpoint.resume_if_exists"]) == f"{source}:{line}"
    assert str(origins["data.shuffle"]) == "plugin nxdt-plugin-migrate"


def test_a_wrong_value_is_reported_at_its_line_of_the_file(tmp_path):
    text = FILES["llama3_8b_pretrain"].read_text().replace("resume_if_exists: True", "resume_if_exists: maybe")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "run.yaml")
    (problem,) = caught.value.problems
    line = next(n for n, text in enumerate(text.splitlines(), 1) if "resume_if_exists" in text)
    assert problem.row().startswith(f"{tmp_path}/run.yaml:{line}: checkpoint.resume_if_exists: found 'maybe'")


def test_of_two_losses_one_is_left_out_and_that_is_said(installed, tmp_path):
    text = FILES["llama3_8b_orpo"].read_text()
    both = text.replace("model_alignment_strategy:", "model_alignment_strategy:\n  dpo:\n    kl_beta: 0.1")
    (tmp_path / "run.yaml").write_text(both)
    done = migrate(tmp_path / "run.yaml", tmp_path / "new.yaml", None, installed)
    read = config.load(tmp_path / "run.yaml", set_paths(tmp_path, done), kernel=installed)
    assert read.selected("objective").component.record.name == "dpo"
    assert [note for note in read.notes if "unsupported; model_alignment_strategy.dpo is given too" in note]


def test_a_file_may_be_based_on_one(installed, tmp_path):
    done = migrate(FILES["llama3_8b_pretrain"], tmp_path / "new.yaml", None, installed)
    overrides = set_paths(tmp_path, done)
    (tmp_path / "run.yaml").write_text(f"base: {FILES['llama3_8b_pretrain']}\ntrainer: {{max_steps: 7}}\n")
    run = config.load(tmp_path / "run.yaml", overrides, kernel=installed).run
    assert (run.trainer.max_steps, run.checkpoint.resume_if_exists) == (7, True)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_commands_read_one_and_say_once_what_became_of_its_keys(nxdt, tmp_path, command):
    overrides = [*SMALL, f"exp_manager.exp_dir={tmp_path}"]
    done = nxdt(command, str(FILES["llama3_8b_pretrain"]), *overrides)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("read as a file of NxD Training, as nxdt config migrate writes it") == 1


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("model.encoder_seq_length=8", "Did you mean 'data.seq_length'?"),
        ("model_source=megatron", "Did you mean 'model.name'?"),
        ("exp_manager.checkpoint_callback_params.save_top_k=1", "the section checkpoint has all of saving"),
        (
            "exp_manager.save_xser=true",
            "It is a key of NxD Training: checkpoints have nxdt's own format. Leave it out.",
        ),
        ("model.hidden_dropout=0.1", "It is a key of NxD Training: the selected model does not read it. Leave it out."),
        ("compiler_flags=-O1", "only the engine nxd reads it, as parallel_engine.compiler_flags. Leave it out."),
    ],
)
@pytest.mark.parametrize("source", ["recipe:llama-tiny", "llama3_8b_pretrain"])
def test_a_legacy_key_on_the_command_line_is_answered_with_the_key_of_today(installed, source, override, answer):
    problems = config.check(FILES.get(source, source), [override], kernel=installed)
    (row,) = [each.row() for each in problems if each.place == "command line"]
    assert answer in row
    assert row.endswith("[NXDT-C010]")


def test_the_engine_nxd_gets_its_settings_where_the_file_names_it(installed, tmp_path):
    pytest.importorskip("nxdt_plugin_nxd", reason="nxdt-plugin-nxd is not installed")
    source = tmp_path / "run.yaml"
    source.write_text(FILES["llama3_8b_pretrain"].read_text() + "\nparallel_engine: {name: nxd}\n")
    done = migrate(source, tmp_path / "new.yaml", None, installed)
    read = config.load(source, set_paths(tmp_path, done), kernel=installed)
    assert "--model-type transformer" in read.selected("engine").config.compiler_flags


@pytest.mark.parametrize("name", ["llama3_8b_pretrain", "nemo_gpt", "nnm_llama"])
def test_without_the_plugin_one_error_says_what_to_install(nxdt, name):
    done = nxdt("config", "check", str(FILES[name]), uninstalled=("nxdt-plugin-migrate",))
    assert done.returncode == 2
    assert done.stderr.splitlines()[:2] == [
        f"[NXDT-C034] No installed migration recognises '{FILES[name]}'.",
        "  Install a migration: pip install nxdt-plugin-migrate (nemo, nnm, nxdt).",
    ]


def test_without_the_plugin_a_file_of_nxdt_is_checked_as_ever(nxdt, tmp_path):
    (tmp_path / "run.yaml").write_text("base: recipe:llama-tiny\nmodel: {num_layrs: 2}\n")
    done = nxdt("config", "check", str(tmp_path / "run.yaml"), uninstalled=("nxdt-plugin-migrate",))
    assert "model.num_layrs: unknown key. Did you mean 'model.num_layers'?" in done.stderr
