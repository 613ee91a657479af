"""Whole runs of a reward model: where its head comes from, what transformers reads of it, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from nxdt_plugin_preference.config import RewardConfig
from nxdt_plugin_preference.reward import Reward

from nxdt_core.cli.app import main
from nxdt_core.config import load
from nxdt_core.data.loader import collate
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession, build
from nxdt_core.train.generate import load_model

SMALL = (
    *("trainer.accelerator=cpu", "trainer.max_steps=3", "trainer.val_check_interval=null"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "data.global_batch_size=8"),
)


@pytest.fixture
def small(tmp_path):
    def made(*overrides, recipe="reward", name="run"):
        where = (f"exp_manager.exp_dir={tmp_path}", f"name={name}")
        return load(f"recipe:llama-tiny-{recipe}", [*SMALL, *where, *overrides])

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


@pytest.mark.parametrize(
    ("packing", "model"),
    [("false", "llama"), ("true", "llama"), ("false", "qwen2"), ("true", "qwen3")],
    ids=["padded", "packed", "qwen2", "qwen3"],
)
def test_transformers_gives_the_same_scores_as_the_run(small, tmp_path, packing, model):
    config = small("trainer.max_steps=8", f"model.name={model}")
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [
        f"{model.title()}ForSequenceClassification"
    ]
    padded = build.dataset(config, build.tokenizer(config)).split("train")
    theirs = scores(tmp_path / "hf", collate([padded[index] for index in range(48)])).view(-1, 2)
    again = ("trainer.max_steps=8", f"data.packing={packing}", "checkpoint.resume_if_exists=true")
    config = small(*again, f"model.name={model}")
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
