"""Chats tuned on a GPT of Megatron's kind; for its weights and one chat, transformers finds the same loss."""

from __future__ import annotations

import json
import math

import pytest
import torch

from nxdt_core.cli import main
from nxdt_core.config import load as load_config
from nxdt_core.data.loader import collate
from nxdt_core.models.loss import CausalLM
from nxdt_core.system.paths import resolve_path
from nxdt_core.train.generate import load_model

pytest.importorskip("nxdt_plugin_gpt", reason="nxdt-plugin-gpt is not installed: no model of Megatron's kind")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
RECIPE = "recipe:gpt-tiny-sft"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of some of the recipe's steps."""
    given = [f"exp_manager.exp_dir={tmp_path_factory.mktemp('megatron')}", "trainer.accelerator=cpu"]
    given += ["trainer.max_steps=20", "trainer.log_every_n_steps=1", "trainer.val_check_interval=20"]
    given += ["data.global_batch_size=4", "data.seq_length=256", "data.truncation=drop"]
    given += ["model.num_layers=2", "trainer.limit_val_batches=1"]
    assert main(["train", RECIPE, *given]) == 0
    return load_config(RECIPE, given)


def test_the_recipe_is_planned(capsys):
    assert main(["plan", RECIPE]) == 0
    assert "recipe:gpt-tiny-sft" in capsys.readouterr().out


@pytest.mark.slow  # the loss is compared with that of transformers
def test_answers_are_learnt(trained):
    losses = [json.loads(line)["loss"] for line in (trained.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20
    assert losses[0] == pytest.approx(math.log(1024), abs=0.5), "fresh weights take every token for as likely"
    assert losses[-1] < losses[0] - 1


def in_transformers(weights):
    """Llama of transformers with these weights: one kind of layer under two names."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    names = {
        "embedding.tokens.": "embed_tokens.",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    given = {}
    for name, weight in weights.items():
        for ours, theirs in {**names, "attention.": "self_attn."}.items():
            name = name.replace(ours, theirs)
        parts = {name: weight}
        if "qkv_proj" in name:
            heads = weight.view(4, 3, 16, 64)
            parts = {name.replace("qkv", kind): heads[:, place].flatten(0, 1) for place, kind in enumerate("qkv")}
        given.update({key if key.startswith("lm_head") else f"model.{key}": part for key, part in parts.items()})
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(given)
    return model


def test_the_loss_is_that_of_transformers_on_what_the_assistant_says(trained, load, write, shipped):
    model = load_model(str(trained.run_dir / "checkpoints")).model
    theirs = in_transformers(model.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")
    )
    record = next(record for record in shipped if "tools" not in record and len(record["messages"]) > 2)
    found = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = torch.tensor([found["input_ids"]]), torch.tensor([found["assistant_masks"]], dtype=torch.bool)
    batch = collate([load(write(record), seq_length=512)[0]])
    ours = model.run_eval([batch], CausalLM())
    with torch.no_grad():
        wanted = theirs(input_ids=ids, labels=ids.where(mask, -100)).loss
    assert ours.weight.item() == mask[:, 1:].sum()
    assert ours.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
