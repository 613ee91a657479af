"""``checkpoint.resume_from`` of a Hugging Face directory alone: model, weights, tokenizer and recipe of a fine-tune."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.cli import main
from nxdt_core.config import check, load
from nxdt_core.run.training import train
from nxdt_core.train.generate import load_model
from tests.train.test_from_hf_directories import FAMILIES, SIZES

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to start from")

LIBRARY = "package://nxdt_plugin_sft_chat/data/library.jsonl"
PAIRS = "package://nxdt_plugin_preference/data/pairs-train.jsonl"
PROMPTS = "package://nxdt_plugin_grpo/data/prompts-train.jsonl"
SIX_LINES = f"""\
name: run
checkpoint: {{resume_from: model}}
data:
  name: sft-chat
  train_files: ["{LIBRARY}"]
trainer: {{max_steps: 2}}
"""
STOPS = [2, 7]
GRPO = (
    *("data.name=prompts", "objective={name: grpo, rewards: [characters], max_completion_length: 4}"),
    *(f"data.train_files=[{PROMPTS}]", "data.seq_length=64"),
)
LONG = {
    "name": "long",
    "trainer": {"max_steps": 2},
    "checkpoint": {"weight_init_only": True},
    "data": {
        "name": "sft-chat",
        "train_files": [LIBRARY],
        "seq_length": 256,
        "global_batch_size": 8,
        "tokenizer": {"library": "huggingface"},
    },
    "model": {"name": "llama", "optim": {"lr": 2e-5}},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Where the directory ``model`` of a small Llama is, with its tokenizer, and ``run.yaml``."""
    root = tmp_path_factory.mktemp("published")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(files("nxdt_plugin_sft_chat") / "data" / "tokenizer"))
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=2e-5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    (root / "run.yaml").write_text(SIX_LINES)
    return root


@pytest.fixture
def here(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return published


def losses(config):
    train(config)
    rows = map(json.loads, (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def test_six_lines_train_as_the_long_form_does_and_the_result_answers(here, tmp_path):
    run, where = load(here / "run.yaml", ["trainer.log_every_n_steps=1"]), str(here / "model")
    long = load(LONG, ["trainer.log_every_n_steps=1", f"checkpoint.resume_from={where}",
                       f"model.model_config={where}", f"data.tokenizer.model={where}"])  # fmt: skip
    assert run.run.model == long.run.model
    assert len(found := losses(run)) == 2
    assert found == losses(long)
    loaded = load_model(str(run.run_dir))
    assert set(STOPS) <= set(loaded.stop_ids)
    assert loaded.tokenizer.chat_template() == (here / "model" / "chat_template.jinja").read_text()
    assert main(["generate", str(run.run_dir), "Hi", "--chat", "--max-new-tokens", "2"]) == 0
    assert main(["train", str(here / "run.yaml"), "checkpoint.resume_if_exists=true", "trainer.max_steps=3"]) == 0
    assert main(["train", str(run.run_dir / "config.yaml"), "name=again"]) == 0, "as it was saved"


def test_what_came_from_the_directory_is_shown_and_can_be_set_otherwise(here, capsys):
    assert main(["config", "show", str(here / "run.yaml")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"hidden_size: 32 # {here}/model/config.json" in lines
    assert f"model: {here}/model # checkpoint.resume_from" in lines
    assert "weight_init_only: true # checkpoint.resume_from" in lines
    assert "seq_length: 256 # default for a published model" in lines
    (note,) = load(here / "run.yaml").notes
    assert note == (
        "checkpoint.resume_from gives weights, stop tokens, architecture (LlamaForCausalLM), tokenizer, chat template; "
        "defaults: data.seq_length 256, data.global_batch_size 8"
    )
    keys = {
        "data.seq_length": 64,
        "data.global_batch_size": 4,
        "data.tokenizer.library": "byte",
        "model.optim.lr": 1e-3,
        "model.rope_theta": 5e5,
        "model.max_position_embeddings": 128,
    }
    values = dict(load(here / "run.yaml", [f"{key}={value}" for key, value in keys.items()]).values())
    assert {key: values[key] for key in keys} == keys
    assert values["data.tokenizer.library"] == "byte"
    assert "data.tokenizer.model" not in values
    values = dict(load(here / "run.yaml", ["model=null"]).values())
    assert values["model.hidden_size"] == 32
    values = dict(load(here / "run.yaml", ["model.name=hf", "data.tokenizer.added_tokens=[<x>]"]).values())
    assert values["model.hf_config.hidden_size"] == 32
    assert values["data.tokenizer.model"] == str(here / "model")


def test_a_long_context_is_cut_and_each_task_has_its_own_rate(here, tmp_path, monkeypatch):
    config = json.loads((here / "model" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    shutil.copy(here / "run.yaml", tmp_path)
    monkeypatch.setenv("MODELS", str(tmp_path))
    for words, rate in (
        ((), 2e-5),
        (("data.name=text", "data.tokenizer.library=byte", "checkpoint.resume_from=${oc.env:MODELS}/model"), 2e-5),
        (("adapter.name=lora",), 2e-4),
        (("data.name=preference", "objective.name=dpo"), 1e-6),
        (("data.name=preference", "objective.name=dpo", "adapter.name=lora"), 5e-6),
    ):
        run = load(tmp_path / "run.yaml", words).run
        assert (run.data.seq_length, run.data.global_batch_size, run.model.optim.lr) == (2048, 8, rate), words
        assert run.data.tokenizer is None or run.data.name == "text", "the directory has no tokenizer"
    shown = load(tmp_path / "run.yaml", ["checkpoint.resume_from=${oc.env:MODELS}/model"]).to_dict()
    assert shown["model"]["model_config"] == "${checkpoint.resume_from}", "not the value of a variable"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_model_and_its_positions(family, here, tmp_path):
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config.architectures = [transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(tmp_path / "model")
    run = load(here / "run.yaml", [f"checkpoint.resume_from={tmp_path / 'model'}"])
    own = {"llama", "mistral", "mixtral", "qwen2", "qwen3"} & {family}
    (name,) = own or ["gpt" if family.startswith("gpt") else "hf"]
    assert run.run.model.name == name
    assert run.run.data.seq_length == SIZES["max_position_embeddings"]


def test_a_configuration_that_describes_its_model_keeps_it(here):
    keys = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    own = [f"model.{key}={value}" for key, value in keys.items()]
    model = dict(load(here / "run.yaml", own).values())
    assert {key: model[f"model.{key}"] for key in keys} == keys
    assert model["model.layernorm_epsilon"] == 2e-5, "what it leaves out is the published model's"
    assert not check(here / "run.yaml", [*own, "model.name=mistral"])


@pytest.mark.parametrize(
    "words",
    [
        ("adapter.name=lora", "adapter.lora_dropout=0"),
        ("data.name=preference", "objective.name=dpo", f"data.train_files=[{PAIRS}]", "data.seq_length=128"),
        GRPO,
    ],
    ids=["lora", "dpo", "grpo"],
)
def test_other_tasks_start_from_the_directory_too(words, here):
    run = load(here / "run.yaml", [*words, "trainer.log_every_n_steps=1"])
    assert run.run.checkpoint.weight_init_only
    assert len(losses(run)) == 2
    assert set(STOPS) <= set(load_model(str(run.run_dir)).stop_ids)


def test_answers_of_reinforcement_learning_end_at_the_stop_tokens_of_the_directory(here, tmp_path, metric_rows):
    model = shutil.copytree(here / "model", tmp_path / "ended")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1024))}))
    run = load(here / "run.yaml", [*GRPO, "trainer.max_steps=1", f"checkpoint.resume_from={model}"])
    train(run)
    assert metric_rows(run.run_dir)[1]["completions/mean_length"] == 1


def losses_of(words):
    return losses(load(words[0], words[1:]))


def test_two_ranks_share_the_model_as_one_process_has_it(here):
    words = [str(here / "run.yaml"), "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"]
    layout = ["trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "name=tp2"]
    alone = losses_of(words)
    first, _ = RankPool(2).run(losses_of, [*words, *layout], timeout_s=120)
    assert first == pytest.approx(alone, rel=1e-5)
    assert main(["plan", *words, *layout]) == 0


def problems_of(source, *words):
    return [(found.key, found.what()) for found in check(source, words)]


def test_a_directory_that_is_no_model_is_named(here, tmp_path, capsys):
    run, model = here / "run.yaml", here / "model"
    (tmp_path / "empty").mkdir()
    for path, reason in (("nowhere", "no file '{}'"), ("empty", "'{}' has no config.json")):
        ((key, text),) = problems_of(run, f"checkpoint.resume_from={path}")
        assert key == "checkpoint.resume_from"
        assert reason.format(tmp_path / path) in text
    other = json.loads((model / "config.json").read_text()) | {"architectures": ["Other"], "model_type": "other"}
    (tmp_path / "empty" / "config.json").write_text(json.dumps(other))
    shutil.copy(model / "model.safetensors", tmp_path / "empty")
    assert main(["config", "check", str(run), "checkpoint.resume_from=empty"]) == 2
    assert "'other'" in capsys.readouterr().err
    shutil.copy(model / "config.json", tmp_path / "empty")
    assert main(["train", str(run), "checkpoint.resume_from=empty"]) == 2
    assert "data.tokenizer.model" in capsys.readouterr().err
