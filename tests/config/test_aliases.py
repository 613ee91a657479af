"""Older spellings: one setting, one value, both places."""

from __future__ import annotations

import pytest

from nxdt_core import config
from nxdt_core.config.fields.duration import seconds_of

ALIASES = [
    ("exp_manager.checkpoint_callback_params.every_n_train_steps", "checkpoint.every_n_train_steps", 5),
    ("exp_manager.checkpoint_callback_params.save_top_k", "checkpoint.save_top_k", 2),
    ("exp_manager.checkpoint_callback_params.save_last", "checkpoint.save_last", False),
    ("exp_manager.checkpoint_callback_params.dirpath", "checkpoint.uri", "memory://x"),
    ("exp_manager.resume_if_exists", "checkpoint.resume_if_exists", True),
    ("exp_manager.resume_ignore_no_checkpoint", "checkpoint.resume_ignore_no_checkpoint", True),
    ("exp_manager.resume_from_checkpoint", "checkpoint.resume_from", "memory://y"),
    ("exp_manager.create_checkpoint_callback", "checkpoint.enabled", False),
    ("exp_manager.async_checkpointing", "checkpoint.async_save", False),
    ("model.encoder_seq_length", "data.seq_length", 128),
]


@pytest.mark.parametrize(("old", "new", "value"), ALIASES)
def test_either_spelling_sets_both(load, good, old, new, value):
    text = good.replace("  seq_length: 64\n", "") if new == "data.seq_length" else good
    for key in (old, new):
        values = dict(load(text, f"{key}={str(value).lower()}").values())
        assert values[old] == values[new] == value


@pytest.mark.parametrize(("old", "new", "value"), ALIASES)
def test_both_set_alike_is_no_problem(load, good, old, new, value):
    text = str(value).lower()
    assert load(good, f"{old}={text}", f"{new}={text}")


def test_both_set_differently_names_both_places(report, good):
    assert report(good, "model.encoder_seq_length=128") == [
        "command line: model.encoder_seq_length: found 128 (an integer), but 'data.seq_length' (run.yaml:7) says"
        " 64 (an integer); both are the same setting. Keep one of the two. [NXDT-C014]"
    ]


def test_two_aliases_of_one_key_set_differently(report, good):
    rows = report(
        good,
        "exp_manager.async_checkpointing=false",
        "exp_manager.checkpoint_callback_params={save_top_k: 1}",
        "exp_manager.checkpoint_callback_params.async_save=true",
    )
    assert any("NXDT-C014" in row for row in rows)


def test_a_null_alias_does_not_contradict(load, good):
    config = load(good, "exp_manager.checkpoint_callback_params.dirpath=null", "checkpoint.uri=memory://x")
    assert config.checkpoint_uri == "memory://x"


NOT_NULL = [key for key, *_ in ALIASES if key not in ("exp_manager.checkpoint_callback_params.dirpath",)]


@pytest.mark.parametrize("key", NOT_NULL)
def test_null_for_an_alias_says_that_it_is_not_set(load, good, key):
    assert load(good, f"{key}=null").to_dict() == load(good).to_dict()


def test_values_are_compared_after_interpolation(load, report, good):
    assert load(good, "model.encoder_seq_length=${multiply:8,8}")
    assert len(report(good, "model.encoder_seq_length=${multiply:8,9}")) == 1


def test_a_wrong_value_is_told_once_where_it_was_written(report, good):
    (row,) = report(good, "exp_manager.checkpoint_callback_params.save_top_k=many")
    assert row.startswith("command line: exp_manager.checkpoint_callback_params.save_top_k: found 'many'")


def test_an_unsupported_value_is_told_once_where_it_was_written(report, good):
    key = "exp_manager.checkpoint_callback_params.save_weights_only"
    (row,) = report(good, f"{key}=true")
    assert row.startswith(f"command line: {key}: found true (a boolean); a checkpoint is saved whole")
    assert row.endswith("Allowed: false. [NXDT-C015]")


@pytest.mark.parametrize("text", ["00:00:30:00", "{minutes: 30}", "{seconds: 1800}", "1800"])
def test_a_time_between_checkpoints_is_read_in_all_its_forms(load, good, text):
    config = load(good, f"exp_manager.checkpoint_callback_params.train_time_interval={text}")
    assert seconds_of(config.run.checkpoint.train_time_interval) == 1800


@pytest.mark.parametrize("key", ["trainer.max_time", "exp_manager.max_time_per_run"])
def test_a_time_limit_is_read_in_seconds(load, good, key):
    assert seconds_of(load(good, f"{key}=3600").run.trainer.max_time) == 3600


NO_TIMES = ("0", "-5", "0.5", "true", "half", "00:30", "00:00:00:00", "{weeks: 1}", "{minutes: 0}")


@pytest.mark.parametrize("text", NO_TIMES)
def test_a_time_that_is_none_is_told_where_it_was_written(report, good, text):
    key = "exp_manager.checkpoint_callback_params.train_time_interval"
    (row,) = report(good, f"{key}={text}")
    assert row.startswith(f"command line: {key}: found ")
    assert row.endswith("[NXDT-C012]")


def test_alignment_parts_go_to_their_sections(load, report, good):
    config = load(good, "model_alignment_strategy.sft.packing=true")
    assert config.selected("dataset").config.packing is True
    assert str(config.origins["data.packing"]) == "alias model_alignment_strategy.sft.packing"
    (row,) = report(good, "model_alignment_strategy.sft.packing=true", "data.packing=false")
    assert "both are the same setting" in row
    (row,) = report(good, "model_alignment_strategy.peft.lora_rank=8")
    assert row.startswith("command line: adapter.name: No adapter is called 'lora'")
    rows = report(good, "model_alignment_strategy={dpo: {kl_beta: 0.1}, orpo: {beta: 0.1}}")
    assert rows[0].startswith("command line: objective.name: No objective is called 'dpo'")
    assert rows[1] == (
        "command line: model_alignment_strategy.orpo: model_alignment_strategy.dpo is given too, and a run has one"
        " loss. Keep one of them. [NXDT-C016]"
    )


def test_the_adapter_to_start_from_may_be_named_with_the_other_keys_of_lora():
    pytest.importorskip("nxdt_plugin_lora", reason="nxdt-plugin-lora is not installed")
    peft = "{load_lora_from_ckpt: true, lora_save_dir: /adapters/x, lora_load_tag: 100}"
    adapter = config.load("recipe:llama-tiny", [f"model_alignment_strategy.peft={peft}"]).selected("adapter").config
    assert (adapter.load_lora_from_ckpt, adapter.lora_save_dir, adapter.lora_load_tag) == (True, "/adapters/x", 100)


def test_a_misspelt_alignment_key_is_told_where_it_was_written(report, good):
    text = good + "model_alignment_strategy:\n  sft:\n    packng: true\n"
    assert report(text)[0] == (
        "run.yaml:15: model_alignment_strategy.sft.packng: unknown key."
        " Did you mean 'model_alignment_strategy.sft.packing' or 'data.packing'? [NXDT-C010]"
    )
