"""A directory of each family goes in, trains ten steps, comes out, and transformers generates from it."""

from __future__ import annotations

import re

import pytest
import torch

from nxdt_core.cli import main
from tests.sampling import sampled

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_inner": 48, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
RATE = 3e-3
SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sampled(metafunc.config, FAMILIES, SAMPLE))


def test_a_directory_trains_and_its_export_generates(family, tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    before = transformers.AutoModelForCausalLM.from_config(config).float()
    before.save_pretrained(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    words = (
        *("train", "recipe:hf-tiny", "name=run", "model.name=null", "model.model_config=in", "trainer.max_steps=10"),
        *("checkpoint.resume_from=in", "checkpoint.weight_init_only=true", f"model.optim.lr={RATE}"),
        *("data.seq_length=32", "data.global_batch_size=8", "trainer.val_check_interval=null"),
    )
    assert main([*words]) == 0
    assert main(["checkpoint", "export", "nxdt_experiments/run/checkpoints", "out"]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(after) is type(before)
    prompt = torch.arange(5)[None]
    written = after.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert written.shape[1] > 5
    moved = {
        name: float((weight - before.get_parameter(name)).detach().abs().max())
        for name, weight in after.named_parameters()
    }
    assert min(moved.values()) > 0, "each parameter has learned"
    assert max(moved.values()) < 12 * RATE, "ten steps from those weights, and from no others"


@pytest.mark.parametrize("one", ["llama", "qwen2"])
def test_a_tokenizer_with_more_ids_than_rows_leads_to_a_model_that_trains(one, tmp_path, monkeypatch, capsys):
    config = transformers.AutoConfig.for_model(one, **{**SIZES, **FAMILIES[one], "vocab_size": 258})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    words = (
        *("train", "recipe:hf-tiny", "name=run", "model.name=null", "trainer.max_steps=1", "data.seq_length=32"),
        *("checkpoint.weight_init_only=true", "trainer.val_check_interval=null", "data.global_batch_size=8"),
    )
    assert main([*words, "model.model_config=DIR", "checkpoint.resume_from=DIR"]) == 2
    said = capsys.readouterr().err
    assert "[NXDT-M051] The tokenizer has 259 ids" in said
    exec(re.search(r'python -c "(.*)", and', " ".join(said.split()))[1], {})  # as the message says
    assert main([*words, "model.model_config=NEW", "checkpoint.resume_from=NEW"]) == 0


def test_a_new_model_of_any_kind_has_the_rows_that_its_vocabulary_size_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "recipe:hf-tiny", "trainer.fast_dev_run=1", "data.seq_length=32", "data.global_batch_size=8")
    assert main([*words, "model.hf_config.vocab_size=200"]) == 2
    assert main([*words, "model.hf_config.vocab_size=200", "model.vocab_size=259"]) == 0
