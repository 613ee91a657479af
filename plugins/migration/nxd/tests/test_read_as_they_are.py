"""Files of other programs that a command reads: they are what ``nxdt config migrate`` writes, and a note says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from nxdt_plugin_migrate.config.migrate import migrate as migrate_file

from nxdt_core import config
from nxdt_core.config.sources import migrate
from nxdt_core.config.tree import parse_yaml
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


FRAMEWORKS = {"NxD Training": "nxdt", "NeMo 1.x": "nemo", "neuronx-nemo-megatron": "nnm"}


def split(overrides) -> dict[str, object]:
    return {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in overrides)}


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
    done = migrate_file(FILES[name], done.target, FRAMEWORKS[done.program], installed, split(overrides))
    told, *lines = [note for note in read.notes if note.startswith(str(FILES[name]))]
    counts = {verdict: sum(row.verdict == verdict for row in done.keys) for verdict in ("mapped", "renamed", "added")}
    assert all(f"{verdict} {count}" in told for verdict, count in counts.items() if count)
    rows = [row for row in done.keys if row.verdict in ("changed", "added", "ignored", "unsupported")]
    assert len(lines) == len([row for row in rows if row.key not in split(overrides)])


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
        ("model.encoder_seq_length=8", "It is a key of NxD Training. Here it is 'data.seq_length'."),
        ("model_source=megatron", "It is a key of NxD Training. Here it is 'model.name'."),
        ("exp_manager.checkpoint_callback_params.save_top_k=1", "Here it is 'checkpoint.save_top_k'."),
        ("exp_manager.checkpoint_callback_params={save_top_k: 1}", "Here it is 'checkpoint.save_top_k'."),
        ("model_alignment_strategy.dpo.kl_beta=0.1", "the section objective names may read it, as objective.kl_beta."),
        (
            "exp_manager.create_neptune_logger=true",
            "NxD Training switches this logger off in every case. Leave it out.",
        ),
        ("enable_recovery_time_instrumentation=true", "It is a key of NxD Training: restarts are not timed"),
        (
            "exp_manager.save_xser=true",
            "It is a key of NxD Training: checkpoints have nxdt's own format. Leave it out.",
        ),
        ("model.hidden_dropout=0.1", "It is a key of NxD Training: the selected model does not read it. Leave it out."),
        ("compiler_flags=-O1", "only the engine nxd reads it, as parallel_engine.compiler_flags. Leave it out."),
    ],
)
def test_over_a_recipe_a_legacy_key_is_answered_with_the_key_of_today(installed, override, answer):
    (problem,) = config.check("recipe:llama-tiny", [override], kernel=installed)
    assert problem.row().startswith("command line: ")
    assert answer in problem.row()
    assert problem.row().endswith("[NXDT-C010]")


def test_in_a_file_of_nxdt_each_legacy_key_of_a_section_is_answered_at_its_line(installed, tmp_path):
    keys = "every_n_train_steps: 5\n    filename: mine\n    every_n_stps: 5"
    text = f"base: recipe:llama-tiny\nexp_manager:\n  checkpoint_callback_params:\n    {keys}\n"
    (tmp_path / "run.yaml").write_text(text)
    problems = config.check(tmp_path / "run.yaml", kernel=installed)
    assert [(each.line, each.key.rpartition(".")[2]) for each in problems] == [
        (4, "every_n_train_steps"), (5, "filename"), (6, "every_n_stps"),
    ]  # fmt: skip
    assert "Here it is 'checkpoint.every_n_train_steps'." in problems[0].row()
    assert "checkpoints are named after their step. Leave it out." in problems[1].row()
    assert "Known here: " in problems[2].row()


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


SAVING = "exp_manager.checkpoint_callback_params"


def words_of(framework):
    """Overrides that a launcher of the file's program takes."""
    sizes, batches = ("distributed_strategy", "data") if framework == "nxdt" else ("model", "model")
    fusions = ("model.fusions.flash_attention", "model.fusions.softmax")
    fusions = fusions if framework == "nxdt" else ("model.masked_softmax_fusion", "model.bias_activation_fusion")
    return {
        "trainer.devices": 32, "trainer.num_nodes": 1, "trainer.max_steps": 60, "trainer.val_check_interval": 20,
        "model.optim.lr": 4e-05, f"{batches}.global_batch_size": 64,
        "model.optim.sched.warmup_steps": 6, "model.optim.sched.constant_steps": 0,
        f"{SAVING}.every_n_train_steps": 7, f"{SAVING}.save_top_k": 3, "exp_manager.save_xser": False,
        f"{sizes}.tensor_model_parallel_size": 4, f"{sizes}.pipeline_model_parallel_size": 1,
        **dict.fromkeys(fusions, False),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", slow_except(FILES, ("llama3_8b_sft", "nxdt_megatron_gpt", "nemo_gpt", "nnm_llama_lora"))
)
def test_an_override_in_the_words_of_a_file_is_as_if_the_file_said_it(name, installed, tmp_path):
    source, done = tmp_path / "run.yaml", migrate(FILES[name], tmp_path / "new.yaml", None, installed)
    tree, _ = parse_yaml(FILES[name].read_text(), name)
    paths, words = set_paths(tmp_path, done), words_of(FRAMEWORKS[done.program])
    source.write_text(yaml.safe_dump(tree.data, sort_keys=False))
    overrides = [f"{key}={yaml.safe_dump(value).partition(chr(10))[0]}" for key, value in words.items()]
    given = config.load(source, [*paths, *overrides], kernel=installed)
    for key, value in words.items():
        tree.set(key, value, tree.origins[()])
    source.write_text(yaml.safe_dump(tree.data, sort_keys=False))
    edited = config.load(source, paths, kernel=installed)
    assert given.to_values() == edited.to_values()
    assert given.run.checkpoint.every_n_train_steps == 7
    assert (given.run.trainer.max_steps, given.run.distributed_strategy.tensor_model_parallel_size) == (60, 4)
    assert given.origins["checkpoint.save_top_k"].at("")["place"] == f"command line ({SAVING}.save_top_k)"


LLAMA_FILE = "llama3_8b_pretrain"


@pytest.fixture
def loaded(installed, tmp_path):
    """Load a file of NxD Training, or one that is based on it, under overrides."""

    def load(*overrides, source=FILES[LLAMA_FILE]):
        paths = set_paths(tmp_path, migrate(FILES[LLAMA_FILE], tmp_path / "other/new.yaml", None, installed))
        return config.load(source, [*paths, *overrides], kernel=installed)

    return load


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((f"{SAVING}.every_n_train_steps=50", "checkpoint.every_n_train_steps=7"), 7),
        (("checkpoint.every_n_train_steps=7", f"{SAVING}.every_n_train_steps=50"), 50),
        ((f"{SAVING}={{every_n_train_steps: 50, save_top_k: 2}}",), 50),
        ((f"{SAVING}.every_n_train_steps=${{trainer.log_every_n_steps}}", "trainer.log_every_n_steps=9"), 9),
    ],
)
def test_of_both_words_for_a_setting_the_last_one_on_the_command_line_counts(loaded, words, steps):
    assert loaded(*words).run.checkpoint.every_n_train_steps == steps


def test_an_override_without_an_effect_here_is_a_note_and_one_that_nxdt_reads_counts(loaded):
    read = loaded("exp_manager.save_xser=false", "model.optim.sched.constant_steps=0", "model.fusions.softmax=true")
    said = [note for note in read.notes if note.startswith("command line: ")]
    assert said[0] == "command line: exp_manager.save_xser: unneeded; checkpoints have nxdt's own format"
    assert [note.split(": ")[1] for note in said[1:]] == ["model.optim.sched.constant_steps", "model.fusions.softmax"]
    (changed,) = [
        note
        for note in loaded("model.optim.sched.name=CosineAnnealing", "model.optim.sched.constant_steps=9999999").notes
        if note.startswith("command line: ")
    ]
    assert changed.startswith("command line: model.optim.sched.constant_steps (9999999 → ")
    assert loaded("data.seq_length=512").run.data.seq_length == 512


def test_an_override_counts_where_the_file_sets_the_same_by_another_key(loaded, tmp_path):
    text = FILES[LLAMA_FILE].read_text()
    both = text.replace("checkpoint_callback_params:", "checkpoint_callback_params:\n    async_save: false")
    (tmp_path / "run.yaml").write_text(both)
    assert loaded(source=tmp_path / "run.yaml").run.checkpoint.async_save is False
    there, here = "exp_manager.async_checkpointing", f"{SAVING}.async_save"
    for words in ([f"{there}=true"], [f"{here}=false", f"{there}=true"], [f"{there}=false", f"{here}=true"]):
        assert loaded(*words, source=tmp_path / "run.yaml").run.checkpoint.async_save is True


def test_an_error_about_an_override_names_it_as_it_was_written(loaded):
    with pytest.raises(ConfigError) as caught:
        loaded(f"{SAVING}.every_n_train_steps=many", "trainer.max_stps=4", f"{SAVING}.every_n_stps=4")
    rows = {problem.key: problem.row() for problem in caught.value.problems}
    place = f"command line ({SAVING}.every_n_train_steps): checkpoint.every_n_train_steps: found 'many' (text)"
    assert rows.pop("checkpoint.every_n_train_steps").startswith(place)
    assert "unknown key. Did you mean 'trainer.max_steps'?" in rows.pop("trainer.max_stps")
    assert "unknown key" in rows.pop(SAVING)
    assert not rows


def test_the_words_of_a_base_are_taken_over_a_file_that_is_based_on_it(loaded, tmp_path):
    (tmp_path / "run.yaml").write_text(f"base: {FILES[LLAMA_FILE]}\ncheckpoint: {{save_top_k: 7}}\n")
    read = loaded(f"{SAVING}.save_top_k=3", source=tmp_path / "run.yaml")
    assert read.run.checkpoint.save_top_k == 3
