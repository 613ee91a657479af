"""Rewards: those of the plugin against TRL's, and calls that wait, take too long, or fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from nxdt_plugin_grpo import config, rewards
from nxdt_plugin_grpo.errors import RewardFailed
from nxdt_plugin_grpo.prompts import Prompt
from nxdt_plugin_grpo.rewards import Answer, Reward, Weighted, score
from nxdt_testing.errors import raises

ANSWERS = [Answer.of("one", [1, 2, 3]), Answer.of("two", [4, 5])]
PROMPTS = [Prompt(place="prompts.jsonl:1", ids=(1,), record={"solution": "1"})] * 2


def weighted(function, name="mine", *, timeout=None, lenient=False):
    return Weighted(name=name, weight=1.0, timeout=timeout, lenient=lenient, function=function)


class Meeting(Reward):
    """Ends when two of it run at the same time."""

    async def __call__(self, answers, records):
        await asyncio.to_thread(self.config.wait, 20)
        return [1.0, None]


class Slow(Reward):
    def __call__(self, answers, records):
        time.sleep(20)
        return [1.0] * len(answers)


class Failing(Reward):
    def __call__(self, answers, records):
        raise ValueError("no judge")


def test_async_rewards_wait_at_the_same_time():
    barrier = threading.Barrier(2)
    found = score([weighted(Meeting(barrier), "a"), weighted(Meeting(barrier), "b")], ANSWERS, PROMPTS)
    assert found == {"a": [1.0, None], "b": [1.0, None]}


def test_other_rewards_run_in_the_main_thread_with_all_answers():
    class Here(Reward):
        def __call__(self, answers, records):
            assert threading.current_thread() is threading.main_thread()
            return [float(answer.ids[0]) for answer, record in zip(answers, records, strict=True)]

    assert score([weighted(Here())], ANSWERS, PROMPTS) == {"mine": [1.0, 4.0]}


@pytest.mark.parametrize(
    ("function", "timeout", "said"),
    [(Slow(), 0.05, "took longer than 0.05 s"), (Failing(), None, "raised ValueError: no judge")],
    ids=["slow", "failing"],
)
def test_a_failure_stops_the_run_or_leaves_the_answers_without_a_score(caplog, function, timeout, said):
    with raises(RewardFailed) as caught:
        score([weighted(function, timeout=timeout)], ANSWERS, PROMPTS)
    assert said in str(caught.value)
    lenient = weighted(function, timeout=timeout, lenient=True)
    assert score([lenient], ANSWERS, PROMPTS) == {"mine": [None, None]}
    assert said in caplog.text


def test_penalties_of_length_and_repetition_are_those_of_trl():
    trl = pytest.importorskip("trl.rewards", reason="trl is not installed; it is pinned in constraints.txt")
    ids = [[1] * 70, [1] * 90, [1] * 120, [1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1], [7]]
    answers = [Answer.of("", each) for each in ids]
    overlong = rewards.Overlong(config.OverlongConfig(max_completion_len=100, soft_punish_cache=20))
    wanted = trl.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=ids)
    assert overlong(answers, []) == pytest.approx(wanted)
    repetition = rewards.Repetition(config.RepetitionConfig(ngram_size=2, max_penalty=-0.5))
    wanted = trl.get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)(completion_ids=ids)
    assert repetition(answers, []) == pytest.approx(wanted)
    assert min(wanted) < -0.2


def test_the_form_and_the_length_of_an_answer():
    form = rewards.Format(config.FormatConfig(pattern="<think>.*</think>.*"))
    texts = ["<think>a\nb</think> 3", "3", "x <think></think>"]
    assert form([Answer.of(text, []) for text in texts], []) == [1.0, 0.0, 0.0]
    length = rewards.Length(config.LengthConfig(target=2, scale=10))
    assert length(ANSWERS, []) == [-0.1, 0.0]


def test_the_file_of_a_reward_imports_nothing_heavy():
    script = """import sys, nxdt_plugin_grpo.rewards
from nxdt_core.kernel.discovery import HEAVY
print([name for name in HEAVY if name in sys.modules])"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
