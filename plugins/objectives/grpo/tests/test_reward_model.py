"""A reward model scores answers as transformers does, wherever it comes from and in every layout; what it cannot be."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from nxdt_plugin_grpo.errors import RewardModelUnfit
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, process_group

from nxdt_core.cli import main
from nxdt_core.cli.plan import print_report
from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession
from nxdt_core.train.plan import plan
from tests.sampling import slow

transformers = pytest.importorskip("transformers")

SIZES = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "trainer.accelerator=cpu")
STRATEGY = "distributed_strategy."
LAYOUTS = {
    "tp2": (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
    "zero3": (f"{STRATEGY}zero_stage=3",),
}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The run of a reward model, and its export."""
    directory = tmp_path_factory.mktemp("reward")
    more = ("trainer.max_steps=4", "trainer.val_check_interval=null", "model.init_method_std=0.2")
    config = load("recipe:llama-tiny-reward", [*SIZES, *more, f"exp_manager.exp_dir={directory}"])
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(directory / "hf")]) == 0
    return {"run": str(config.run_dir), "checkpoint": config.checkpoint_uri, "hf": str(directory / "hf")}


def scored(directory, path, overrides=()):
    """The groups of the last step of a run whose reward is the model at ``path``, and that step's mean rewards."""
    rewards = f"objective.rewards=[{{name: model, path: {path}, weight: 2}}, characters]"
    batch = ("data.global_batch_size=4", "data.micro_batch_size=2", "objective.num_generations=4")
    keys = (*SIZES, *batch, rewards, "trainer.max_steps=2", f"exp_manager.exp_dir={directory}", *overrides)
    with TrainSession(load("recipe:llama-tiny-grpo", keys)) as session:
        batches = [session.step(batch) for batch in session.batches()]
        rows = [asdict(group) for group, _ in session.objective.samples]
        session.evaluate()
        return rows, float(batches[-1].loss.metrics["rewards/model"]), float(batches[-1].loss.metrics["reward"])


def scored_by_rank(*arguments):
    with process_group(timeout_s=60):
        return scored(*arguments)


def check_scores(directory, groups):
    """Compare with those of transformers, without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    scores = []
    for group in groups:
        for answer, score in zip(group["answers"], group["rewards"]["model"], strict=True):
            with torch.no_grad():
                expected = float(model(torch.tensor([[*group["prompt"], *answer]])).logits[0, 0])
            assert score == pytest.approx(expected, abs=1e-5)
            scores.append(score)
    assert max(scores) - min(scores) > 0.01
    return sum(scores) / len(scores)


@pytest.mark.parametrize("source", ["hf", "run", slow("checkpoint")])
def test_scores_are_those_of_transformers(reward_model, tmp_path, source):
    groups, mean, reward = scored(tmp_path, reward_model[source])
    assert mean == pytest.approx(check_scores(reward_model["hf"], groups), abs=1e-5)
    others = [score for group in groups for score in group["rewards"]["characters"]]
    assert reward == pytest.approx(2 * mean + sum(others) / len(others), abs=1e-5)


@pytest.mark.parametrize("layout", ["zero3", slow("tp2"), slow("pp2"), slow("cp2")])
def test_scores_do_not_depend_on_the_layout(reward_model, tmp_path, layout):
    """A validation ends with a blank sample on one of two data parallel ranks."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Digits:", "characters": "0123"}) + "\n" for _ in range(5)))
    overrides = ("trainer.devices=2", f"data.validation_files=[{file}]", *LAYOUTS[layout])
    found = RankPool(2).run(scored_by_rank, tmp_path, reward_model["hf"], overrides, timeout_s=120)
    for groups, _, _ in found:
        check_scores(reward_model["hf"], groups)
    assert found[0][1] == found[1][1]


def test_the_plan_counts_the_reward_model(reward_model, capsys):
    keys = [*SIZES, f"objective.rewards=[{{name: model, path: {reward_model['hf']}}}]"]
    alone = plan(load("recipe:llama-tiny-grpo", SIZES)).estimate.fullest.memory
    both = plan(load("recipe:llama-tiny-grpo", keys))
    assert both.estimate.fullest.memory.weights > 1.5 * alone.weights
    print_report(both)
    assert "weights" in capsys.readouterr().out


def test_models_that_cannot_score_the_answers_are_refused(reward_model, tmp_path):
    first = load("recipe:llama-tiny", [*SIZES, "trainer.max_steps=1", f"exp_manager.exp_dir={tmp_path}"])
    train(first)
    with raises(RewardModelUnfit, match="gives logits, and no scores"):
        scored(tmp_path, first.run_dir)
    library = ("data.tokenizer.library=huggingface", "model.vocab_size=1024")
    named = (*library, "data.tokenizer.model=package://nxdt_plugin_sft_chat/data/tokenizer")
    with raises(RewardModelUnfit, match="has another tokenizer than the data"):
        scored(tmp_path, reward_model["run"], named)
    with raises(RewardModelUnfit, match="has 272 rows, and the tokenizer of the data 1024 ids"):
        scored(tmp_path, reward_model["hf"], named)
    with pytest.raises(NxdtError, match=r"rewards\[0\].*timeout or on_error"):
        load("recipe:llama-tiny-grpo", ["objective.rewards=[{name: model, path: here, timeout: 3}]"])
    with pytest.raises(NxdtError, match=r"rewards\[0\]\.path"):
        load("recipe:llama-tiny-grpo", ["objective.rewards=[model]"])
