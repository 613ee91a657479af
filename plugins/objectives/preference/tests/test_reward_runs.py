"""Whole runs of a reward model: where its head comes from, what transformers reads of it, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from nxdt_plugin_preference.config import RewardConfig
from nxdt_plugin_preference.objectives import Reward
from nxdt_testing.ranks import RankPool, process_group

from nxdt_core.cli.app import main
from nxdt_core.config import load
from nxdt_core.data.loader import collate
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession, build
from nxdt_core.train.generate import load_model
from tests.sampling import slow

SMALL = (
    *("trainer.accelerator=cpu", "trainer.max_steps=3", "trainer.val_check_interval=null"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "data.global_batch_size=8"),
)


@pytest.fixture
def small(tmp_path):
    def made(*overrides, recipe="reward", name="run", model=None):
        where = (f"exp_manager.exp_dir={tmp_path}", f"name={name}")
        config = load(f"recipe:llama-tiny-{recipe}", [*SMALL, *where, *overrides])
        if model is None:
            return config
        section = {"score_head": True, "optim": config.to_dict()["model"]["optim"], **model}
        return load({**config.to_dict(), "model": section})

    return made


def scores(directory, batch):
    """Scores [rows] of transformers."""
    transformers = pytest.importorskip("transformers")
    model, told = transformers.AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    padding = model.config.pad_token_id
    assert (batch.input_ids == padding).any()  # so that it must find the last token
    with torch.no_grad():
        found = model(batch.input_ids, attention_mask=(batch.input_ids != padding).long()).logits
    assert found.shape == (len(batch.input_ids), 1)
    return found[:, 0]


SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 260, "init_method_std": 0.1}
WRAPPED = {
    **{"model_type": "gemma2", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    **{"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.1},
}
MODELS = {
    "gpt2": {"name": "gpt", **SIZES, "max_position_embeddings": 512, "activation": "gelu_tanh"},
    "gpt_neox": {"name": "gpt", **SIZES, "position_embedding_type": "rope", "transformer_block_type": "gpt_j"},
    "hf": {"name": "hf", "hidden_size": 32, "vocab_size": 260, "hf_config": WRAPPED},
}
"""Sections in place of that of the recipe."""
CLASSES = {"gpt2": "GPT2", "gpt_neox": "GPTNeoX", "hf": "Gemma2"}


@pytest.mark.parametrize(
    ("packing", "model"),
    [
        *(("false", "llama"), ("true", "llama"), ("false", "qwen2"), ("true", "qwen3")),
        *(("false", "gpt2"), ("true", "gpt_neox"), ("true", "hf")),
    ],
    ids=["padded", "packed", "qwen2", "qwen3", "gpt2", "gpt_neox", "hf"],
)
def test_transformers_gives_the_same_scores_as_the_run(small, tmp_path, packing, model):
    overrides = () if model in MODELS else (f"model.name={model}",)
    config = small("trainer.max_steps=8", *overrides, model=MODELS.get(model))
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [
        f"{CLASSES.get(model, model.title())}ForSequenceClassification"
    ]
    padded = build.dataset(config, build.tokenizer(config)).split("train")
    theirs = scores(tmp_path / "hf", collate([padded[index] for index in range(48)])).view(-1, 2)
    again = ("trainer.max_steps=8", f"data.packing={packing}", "checkpoint.resume_if_exists=true")
    config = small(*again, *overrides, model=MODELS.get(model))
    with TrainSession(config) as session:
        session.resume()
        own = build.dataset(config, build.tokenizer(config)).split("train")
        found = session.evaluate_batch([collate([own[index] for index in range(len(own))])])
    assert float(found.weight) == 48
    assert abs(float(found.metrics["rewards/margins"])) > 0.01
    wanted = {
        "rewards/chosen": theirs[:, 0].mean(),
        "rewards/rejected": theirs[:, 1].mean(),
        "rewards/accuracies": (theirs[:, 0] > theirs[:, 1]).float().mean(),
    }
    for name, figure in wanted.items():
        assert float(found.metrics[name]) == pytest.approx(float(figure), abs=1e-5)


def losses_of_rank(values, overrides=()):
    """Losses of three steps in this process, which may be one of several."""
    with process_group(timeout_s=60) if overrides else nullcontext(), TrainSession(load(values, overrides)) as session:
        return [float(session.step(batch).loss.loss) for batch in session.batches()]


STRATEGY = "distributed_strategy."
TP2 = (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true")
PP2 = (f"{STRATEGY}pipeline_model_parallel_size=2",)


@pytest.mark.parametrize(("model", "layout"), [("gpt2", TP2), ("hf", TP2), slow("gpt2", PP2), slow("hf", PP2)], ids=str)
def test_scores_of_all_models_do_not_depend_on_the_layout(small, model, layout):
    values = small("data.micro_batch_size=2", model=MODELS[model]).to_dict()
    alone, pool = losses_of_rank(values), RankPool(2)
    for found in pool.run(losses_of_rank, values, ("trainer.devices=2", *layout), timeout_s=120):
        assert found == pytest.approx(alone, abs=1e-5)
    assert alone[0] != alone[-1]


def test_a_run_begins_with_a_language_model_where_it_may_lack_the_head(small, tmp_path, caplog):
    first = small("objective.name=causal_lm", "model.score_head=false", "data.name=preference", name="lm", recipe="dpo")
    train(first)
    assert main(["checkpoint", "export", first.checkpoint_uri, str(tmp_path / "lm-hf")]) == 0
    still = ("model.optim.lr=0", "model.optim.sched.min_lr=0")
    for number, source in enumerate((first.checkpoint_uri, str(tmp_path / "lm-hf"))):
        begins = (f"checkpoint.resume_from={source}", "checkpoint.weight_init_only=true")
        with pytest.raises(NxdtError, match=r"score\.weight(.|\n)*checkpoint\.strict"):
            train(small(*begins, name=f"refused-{number}"))
        caplog.clear()
        with caplog.at_level("WARNING"):
            config = small(*begins, "checkpoint.strict=false", *still, name=f"begins-{number}")
            train(config)
        assert "score.weight" in caplog.text
        with TrainSession(first) as before, TrainSession(config) as after:
            before.resume()
            after.resume()
            old, new = (dict(session.model.named_parameters()) for session in (before, after))
        assert new.keys() - old.keys() == {"score.weight"}
        assert old.keys() - new.keys() == {"lm_head.weight"}
        assert all(torch.equal(new[name], old[name]) for name in new.keys() & old.keys())
        assert new["score.weight"].std() > 0.01


def test_with_lora_the_head_trains_too_and_the_base_does_not(small):
    config = small("adapter.name=lora", "model.optim.lr=0.01", "model.optim.sched.warmup_steps=0")
    assert config.to_values()["adapter"]["modules_to_save"] == ["score"]
    with TrainSession(config) as session:
        before = {name: weight.detach().clone() for name, weight in session.model.named_parameters()}
        for batch in session.batches():
            session.step(batch)
        changed = {name for name, weight in session.model.named_parameters() if not torch.equal(weight, before[name])}
    assert "score.weight" in changed
    assert changed - {"score.weight"}
    assert all("lora" in name for name in changed - {"score.weight"})


def test_a_head_that_does_not_fit_the_objective_is_refused_before_the_run(small):
    for overrides, said in (
        (("model.score_head=false",), r"'reward' takes scores(.|\n)*Set model\.score_head to true"),
        (("objective={name: dpo}",), r"'dpo' takes logits(.|\n)*Set model\.score_head to false"),
    ):
        with pytest.raises(NxdtError, match=f"M095.*{said}"):
            train(small(*overrides))


def test_a_reward_model_writes_no_text(small):
    config = small("trainer.max_steps=1")
    train(config)
    with pytest.raises(NxdtError, match=r"T008.*gives scores"):
        load_model(config.checkpoint_uri)


@pytest.mark.parametrize("packing", ["false", "true"], ids=["padded", "packed"])
def test_the_last_token_of_each_answer_is_scored(small, packing):
    """Scores that are each token's id: what is read is the end token, which only the last place has."""
    config = small(f"data.packing={packing}")
    dataset = build.dataset(config, build.tokenizer(config)).split("train")
    batch = collate([dataset[index] for index in range(len(dataset))])
    ids = batch.input_ids
    output = Reward(RewardConfig())(ids[..., None].float().requires_grad_(), batch, StepContext())
    assert float(output.weight) == 48
    for name in ("rewards/chosen", "rewards/rejected"):
        assert float(output.metrics[name]) == 48 * 257
