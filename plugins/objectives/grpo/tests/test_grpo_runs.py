"""Whole runs: rewards rise, a run that stops between two steps on the same answers continues with them, layouts agree,
a third party's reward is a reward, and what is wrong with one is said."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from nxdt_plugin_grpo.config import CharactersConfig, MatchConfig
from nxdt_plugin_grpo.errors import NoPrompts, PromptMissing, PromptTooLong, RewardFailed
from nxdt_plugin_grpo.rewards import Characters, Match
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, process_group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.cli.plan import print_report
from nxdt_core.config import check, load
from nxdt_core.distributed.device_operations import HostOperations
from nxdt_core.distributed.devices import CPU, PROFILES
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.run.training import train
from nxdt_core.train import TrainSession
from nxdt_core.train.plan import plan
from nxdt_core.train.sampling import Writer
from tests import processes
from tests.sampling import slow

REWARD = """
from nxdt_core.api import Component, hookimpl
from nxdt_plugin_grpo.rewards import Reward


class Short(Reward):
    def __call__(self, answers, records):
        return {body}


@hookimpl
def nxdt_components():
    return {{"reward": [Component(name="short", target="short:Short")]}}
"""


NARROW = (
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "trainer.accelerator=cpu"),
    *("data.global_batch_size=4", "data.micro_batch_size=2", "objective.num_generations=4"),
)


def narrow(directory, *overrides, name="run"):
    return load(
        "recipe:llama-tiny-grpo",
        [
            *(f"exp_manager.exp_dir={directory}", f"name={name}"),
            *NARROW,
            *("trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1"),
            "exp_manager.create_tensorboard_logger=false",
            *overrides,
        ],
    )


@pytest.fixture
def small(tmp_path):
    """``small(*overrides, name=…)``: a run of two narrow layers."""
    return partial(narrow, tmp_path)


def rows(config, file="metrics.jsonl"):
    found = [json.loads(line) for line in (config.run_dir / file).read_text().splitlines()]
    return {row["step"]: (row["loss"], row["reward"], row["completions/mean_length"]) for row in found}


def weights(config):
    store, _ = checkpoint.locate(str(config.run_dir / "checkpoints"))
    return checkpoint.load_model(store, checkpoint.find_checkpoint(store, None, warn=print))


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_run_that_stops_within_a_set_of_answers_goes_on_with_it(small, iterations, caplog):
    whole = small(f"objective.num_iterations={iterations}", name="whole")
    train(whole)
    assert "NXDT-T024" not in caplog.text
    stopped = small(f"objective.num_iterations={iterations}", "trainer.max_steps=2", name="stopped")
    train(stopped)
    again = small(f"objective.num_iterations={iterations}", name="stopped")
    train(again)
    assert rows(again) == rows(whole)
    mine, other = weights(again), weights(whole)
    assert all(torch.equal(mine[name], other[name]) for name in other)
    lengths = [row[1:] for row in rows(whole).values()]
    assert (lengths[0] == lengths[1] == lengths[2]) == (iterations == 3)


def test_the_reward_rises(small):
    config = small("trainer.max_steps=40", "objective.num_generations=8", "trainer.val_check_interval=40", "seed=3")
    train(config)
    rewards = [row[1] for row in rows(config).values()]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert rows(config, "validation.jsonl")[40][1] > 0


LAYOUTS = {
    "dp2": ("trainer.devices=2",),
    "tp2": ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2"),
    "pp2": ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2"),
    "dp2-zero1": ("trainer.devices=2", "distributed_strategy.zero1=true"),
}


SHARED = ("objective.num_iterations=2", "data.global_batch_size=8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process that all layouts are compared with."""
    config = narrow(tmp_path_factory.mktemp("alone"), *SHARED)
    train(config)
    return config


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("pp2", "dp2-zero1")), "dp2", "tp2"]
)
def test_layouts_draw_and_learn_the_same(small, alone, layout, tmp_path):
    """The second data-parallel rank has blank samples alone in validation, whose four prompts are half of a batch. A
    longer window does not make rows of answers longer."""
    config = small(*SHARED, "data.seq_length=128", *LAYOUTS[layout], name="several")
    file = tmp_path / "several.yaml"
    file.write_text(json.dumps(config.to_values()))
    command = [sys.executable, "-m", "nxdt_core", "train", str(file)]
    done = processes.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for step, (loss, *drawn) in rows(alone).items():
        found = rows(config)[step]
        assert found[0] == pytest.approx(loss, abs=1e-4)
        assert found[1:] == pytest.approx(drawn, abs=1e-6)
    validated = [rows(each, "validation.jsonl")[4][1:] for each in (config, alone)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-6)


def test_rows_are_as_long_as_the_longest_answer_needs(small):
    with TrainSession(small("data.seq_length=128")) as session:
        batch = next(iter(session.batches()))
        (first, *_), _ = session.objective.generate(session, batch.micro_batches, train=True)
    assert first.input_ids.shape == (8, 64)
    ends = (first.labels != IGNORE_INDEX).long().cumsum(1).argmax(1) + 1  # the last label is the token behind
    assert torch.equal(~first.padding, torch.arange(64) <= ends.unsqueeze(1))


@pytest.fixture
def short(tmp_path, monkeypatch):
    """``short(body)``: override with a local plugin whose reward ``short`` returns that expression."""

    def made(body):
        (tmp_path / "short.py").write_text(REWARD.format(body=body))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "short", raising=False)
        return f"plugins.local=[{tmp_path / 'short.py'}]"

    return made


def losses_with_uneven_answers(directory, overrides):
    """Losses of three steps, where each answer of the second rank ends at once and those of the first never do."""
    with process_group(timeout_s=60):
        config = load(
            "recipe:llama-tiny-grpo", [f"exp_manager.exp_dir={directory}", "trainer.devices=2", *NARROW, *overrides]
        )
        with TrainSession(config) as session:
            session.stop_ids = frozenset(range(256) if torch.distributed.get_rank() else ())
            return [float(session.step(batch).loss.loss) for batch, _ in zip(session.batches(), range(3), strict=False)]


SHARDED = {
    "zero1": ("distributed_strategy.zero1=true",),
    "zero3": ("distributed_strategy.zero_stage=3",),
    "ep2": (
        "model.name=mixtral",
        "model.moe={num_experts: 4, top_k: 2, dropless: true}",
        "distributed_strategy.expert_model_parallel_size=2",
    ),
}


@pytest.mark.parametrize("layout", ["zero1", slow("zero3"), slow("ep2")])
def test_ranks_that_share_weights_do_not_wait_for_answers_of_other_lengths(tmp_path, layout):
    first, second = RankPool(2).run(losses_with_uneven_answers, str(tmp_path), SHARDED[layout], timeout_s=120)
    assert first == second


@pytest.mark.parametrize(
    ("changed", "prompts", "answers"),
    [
        ("data.global_batch_size=8", 8, 4),
        ("data.global_batch_size=2", 2, 4),
        ("objective.num_generations=2", 4, 2),
        ("objective.rewards=[characters, short]", 4, 4),
        ("data.seq_length=24", 4, 4),
    ],
)
def test_a_run_that_goes_on_with_other_keys_draws_its_own_answers(small, short, changed, prompts, answers):
    same = ("objective.num_iterations=3", "objective.max_completion_length=4")
    train(small("objective.num_iterations=3", "trainer.max_steps=1"))
    with TrainSession(small(*same, short("[0.5] * len(answers)"), changed)) as session:
        session.resume()
        batches = iter(session.batches())
        session.step(next(batches))
        groups = session.state.data["generated"]
        session.step(next(batches))
        assert session.state.data["generated"] == groups
    assert [len(group["answers"]) for group in groups.values()] == [answers] * prompts
    assert all(len(answer) <= 4 for group in groups.values() for answer in group["answers"])


def test_a_reward_of_a_third_party_is_a_reward(small, short):
    rewards = "objective.rewards=[{name: short, weight: 2}, characters]"
    config = small(short("[-len(answer) / 100 for answer in answers]"), rewards, "trainer.max_steps=1")
    train(config)
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row["reward"] == pytest.approx(2 * row["rewards/short"] + row["rewards/characters"], abs=1e-6)
    assert row["rewards/short"] < 0


def test_answers_of_one_reward_teach_nothing_whatever_their_mean_is_rounded_to(small, short):
    assert torch.full((6,), 0.9).std() > 0
    config = small(
        short("[0.9] * len(answers)"), "objective.rewards=[short]", "objective.num_generations=6", "trainer.max_steps=1"
    )
    train(config)
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (row["frac_reward_zero_std"], row["grad_norm"]) == (1.0, 0.0)


def test_answers_of_some_steps_are_listed_with_rewards_and_advantages(small, tmp_path):
    config = small(
        "trainer.callbacks=[{name: samples, every_n_steps: 2, prompts: 3}]",
        *("trainer.val_check_interval=null", "exp_manager.create_tensorboard_logger=true"),
    )
    train(config)
    written = [json.loads(line) for line in (config.run_dir / "generations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == [2] * 12 + [4] * 12
    for first in range(0, 24, 4):
        group = written[first : first + 4]
        rewards = torch.tensor([row["rewards"]["characters"] for row in group])
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        torch.testing.assert_close(torch.tensor([row["advantage"] for row in group]), wanted, rtol=1e-4, atol=1e-4)
        assert {row["prompt"] for row in group} == {group[0]["prompt"]}
    events = EventAccumulator(str(config.run_dir))
    events.Reload()
    (text, last) = events.Tensors("samples/text_summary")
    assert (text.step, last.step) == (2, 4)
    assert json.dumps(written[-1]["text"]) in last.tensor_proto.string_val[0].decode()
    assert main(["report", str(config.run_dir), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    row = written[-1]
    assert f"step 4: characters {row['rewards']['characters']:.4g}, advantage {row['advantage']:.4g}" in page


def test_the_reference_has_the_temperature_of_the_answers(small):
    """A fresh adapter changes nothing, so that there is no divergence from its base."""
    more = ("adapter.name=lora", "objective.beta=0.1", "objective.temperature=1.3")
    config = small(*more, "trainer.max_steps=1", "trainer.val_check_interval=null")
    train(config)
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row["kl"] == 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[1.0]", "returned 1 numbers for 16 answers"),
        ("[float('nan')] * len(answers)", "returned nan"),
        ("records[0]['nowhere']", "raised KeyError"),
        ("None", "raised TypeError"),
        ("exit(0)", "raised SystemExit: 0"),
        ("[1e300] * len(answers)", "returned 1e+300"),
        ("[10**400] * len(answers)", "raised OverflowError"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_record(small, short, body, said):
    config = small(short(body), "objective.rewards=[short]")
    with raises(RewardFailed) as caught:
        train(config)
    assert "'short'" in str(caught.value)
    assert said in str(caught.value)
    assert "prompts-train.jsonl:" in str(caught.value)


def test_a_reward_that_switches_autograd_off_changes_nothing(small, short):
    off, losses = "(__import__('torch').set_grad_enabled(False), [float(len(each)) for each in answers])[1]", []
    for name, body in (("without", off), ("with", "[float(len(each)) for each in answers]")):
        config = small(short(body), "objective.rewards=[short]", "trainer.max_steps=2", name=name)
        try:
            train(config)
        finally:
            torch.set_grad_enabled(True)
        losses.append(rows(config))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("objective.rewards=[charakters]", "characters"),
        ("objective.rewards=[{weight: 1}]", "has no name"),
        ("objective.rewards=[{name: characters, weight: much}]", "'much'"),
        ("objective.rewards=[{name: characters, weight: 1e300}]", "a number beyond"),
        ("objective.rewards=[{name: characters, keys: a}]", "keys"),
        ("objective.rewards=[{name: match, pattern: '('}]", "is not a regular expression"),
        ("objective.rewards=[]", "no reward is named"),
        ("objective.num_generations=1", "at least 2"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_built(small, override, said):
    with pytest.raises(NxdtError, match=said):
        small(override)


@pytest.mark.parametrize(
    ("rewards", "override", "place"),
    [
        ("[nosuch]", (), "run.yaml:5: objective.rewards[0]"),
        ("\n    - match\n    - {name: characters, key: 3}", (), "run.yaml:7: objective.rewards[1].key"),
        ("\n    - match\n    - name: characters\n      keys: a", (), "run.yaml:8: objective.rewards[1].keys"),
        ("[match]", ("objective.rewards=[{name: nosuch}]",), "command line: objective.rewards[0]"),
    ],
)
def test_what_is_wrong_with_a_reward_is_placed_where_it_is_set(tmp_path, rewards, override, place):
    path = tmp_path / "run.yaml"
    path.write_text(f"\n\nbase: recipe:llama-tiny-grpo\nobjective:\n  rewards: {rewards}\n")
    (problem,) = check(path, override)
    assert problem.row().removeprefix(f"{tmp_path}/").startswith(f"{place}: ")


def test_a_prompt_that_leaves_no_room_is_refused_with_its_place(small):
    with raises(PromptTooLong, match="prompts-train.jsonl:"):
        train(small("objective.max_completion_length=30"))


def test_a_record_without_a_prompt_is_refused_with_its_place(small, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "Why?"}\n')
    with raises(PromptMissing, match=r"bad.jsonl:1.*'question'"):
        train(small(f"data.train_files=[{file}]", "data.validation_files=[]", "trainer.val_check_interval=null"))


TEXT = ("data.train_files=[package://nxdt_plugin_text/data/kjv.txt]", "data.validation_files=[]")
OTHERS = """
from nxdt_core.api import Component, hookimpl
from nxdt_plugin_grpo.rewards import Reward


@hookimpl
def nxdt_datasets():
    target, config = "nxdt_plugin_text.loader:TextData", "nxdt_plugin_text.config:TextConfig"
    return [Component(name="others", target=target, config=config)]
"""


def test_data_without_prompts_is_refused_before_anything_is_built(small):
    with pytest.raises(NxdtError, match=r"data\.name: the dataset 'text' has no prompts.*Set data\.name to prompts"):
        small("data.name=text", *TEXT)


def test_data_of_others_without_prompts_is_refused_before_an_answer_is_drawn(small, tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.setattr(Writer, "answers", lambda *_, **__: pytest.fail("an answer is drawn"))
    with raises(NoPrompts):
        train(
            small(f"plugins.local=[{tmp_path}/others.py]", "data.name=others", *TEXT, "trainer.val_check_interval=null")
        )


def test_the_plan_and_the_banner_count_prompts_and_answers(small, capsys):
    print_report(plan(small()))
    assert "4 prompts x 4 answers of 32 = 512 tokens, " in capsys.readouterr().out
    assert train(small("trainer.max_steps=1", "trainer.val_check_interval=null")).step == 1
    assert "prompts, 4 prompts x 4 answers of 32 = 512 tokens per step" in capsys.readouterr().err


def test_the_plan_counts_the_cache_of_keys_and_values_that_a_device_keeps(small, monkeypatch):
    """On a host that says it records passes; the answers, and so the losses, are those of other hosts."""

    class Recording(HostOperations):
        def recorded(self, run, device):
            return run

    def losses(session):
        return [float(session.step(batch).loss.loss) for batch, _ in zip(session.batches(), range(2), strict=False)]

    with TrainSession(small()) as session:
        expected = losses(session)
    assert plan(small()).estimate.fullest.memory.cache == 0, "it is freed before the step"
    monkeypatch.setitem(PROFILES, "cpu", replace(CPU, records=True, operations=Recording()))
    with TrainSession(small()) as session:
        assert losses(session) == expected
        (recorded,) = session.model._recorded.values()
    kept = [tensor for *_, core in recorded.cache._cores for tensor in (core.keys, core.values)]
    assert plan(small()).estimate.fullest.memory.cache == sum(tensor.nbytes for tensor in kept) > 0


@pytest.mark.parametrize(
    ("answer", "solution", "score"),
    [
        *(("7 + 5 is 12.", "12", 1), ("12.0", 12, 1), ("12 or 13", "12", 0), ("none", "12", 0), ("", "12", 0)),
        *(("So she pays $1,450.", solution, score) for solution, score in (("1450", 1), ("$1,450", 1), ("450", 0))),
        *(("1,234,567 people", 1234567, 1), ("3,4", "4", 1), ("1234,567", "234567", 0), ("#### 1,234", "1,234", 1)),
        *(("#### 72", "He sold 48/2 = 24, so 72.\n#### 72", 1), ("about 10-12", "12", 1), ("5-2=3", "3", 1)),
        *(("it is -3", "-3", 1), ("x=-3", "3", 0), ("a loss of -$5", -5, 1), ("$.50", "0.5", 1), ("1e3", 1000, 1)),
        *(("12.50%", 12.5, 1), ("34", "3,4", 0), ("1000", "1_000", 0)),
    ],
)
def test_match_looks_for_the_last_number(answer, solution, score):
    assert Match(MatchConfig())([answer], [{"solution": solution}]) == [score]


def test_match_takes_the_group_of_a_pattern():
    match = Match(MatchConfig(pattern=r"<b>(.*?)</b>", key="city"))
    assert match(["It is <b>Rome</b>.", "Rome"], [{"city": "Rome"}] * 2) == [1, 0]
    assert Match(MatchConfig(pattern="is (.*)"))(["It is +1,450."], [{"solution": "1450"}]) == [1]


def test_characters_are_counted():
    assert Characters(CharactersConfig())(["a1", "", "ab"], [{"characters": "ab"}] * 3) == [0.5, 0, 1]
