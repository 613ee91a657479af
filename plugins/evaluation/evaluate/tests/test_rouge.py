"""ROUGE of answers: the library's figures, and words of any script."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from nxdt_plugin_evaluate.rouge import Rouge
from nxdt_testing.metric_contract import MetricContract

from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.run.training import train
from nxdt_core.system.paths import resolve_path
from tests.train.small import SMALL


class TestRouge(MetricContract):
    """All tests are inherited."""

    @pytest.fixture
    def factory(self):
        return Rouge


def test_figures_are_means_over_the_answers():
    given = ["the cat sat", "the cat", "dogs", "sat the cat"]
    found = Rouge().compute(["the cat sat"] * len(given), given)
    words, pairs_of_words = 2 * (1 * 2 / 3) / (1 + 2 / 3), 2 * (1 * 1 / 2) / (1 + 1 / 2)  # F of "the cat"
    assert found["rouge1"] == pytest.approx((1 + words + 0 + 1) / 4)
    assert found["rouge2"] == pytest.approx((1 + pairs_of_words + 0 + 1 / 2) / 4)
    assert found["rougeL"] == pytest.approx((1 + words + 0 + 2 / 3) / 4), "the longest common run is 'the cat'"


def rouge_of(wanted, given):
    return Rouge().compute([wanted], [given])


def test_rouge_of_ascii_texts_is_that_of_the_library():
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(("rouge1", "rouge2", "rougeL"))
    pairs = itertools.pairwise(
        Path(resolve_path("package://nxdt_plugin_text/data/kjv.txt")).read_text().split("\n")[:80]
    )
    for wanted, given in [*((a, b) for a, b in pairs if a and b), ("It's_a 2nd--try: A1!", "its a 2ND try_a1 (\t)")]:
        assert wanted.isascii()
        assert rouge_of(wanted, given) == {name: each.fmeasure for name, each in scorer.score(wanted, given).items()}


@pytest.mark.parametrize(
    ("wanted", "given", "share"),
    [
        ("Москва — столица России", "москва, столица", 2 * 2 / (3 + 2)),
        ("東京は首都です", "東京です", 2 * 4 / (7 + 4)),
        ("दिल्ली भारत की राजधानी", "दिल्ली राजधानी", 2 * 2 / (4 + 2)),
        ("القاهرة عاصمة مصر", "عاصمة مصر", 2 * 2 / (3 + 2)),
        ("ไทยดี", "ดี", 2 * 1 / (4 + 1)),
        ("un café noir", "cafe\u0301 noir", 2 * 2 / (3 + 2)),
    ],
)
def test_rouge_knows_the_words_of_other_scripts(wanted, given, share):
    assert set(rouge_of(wanted, wanted).values()) == {1.0}
    assert rouge_of(wanted, given)["rouge1"] == pytest.approx(share)
    assert rouge_of(wanted, "zero")["rouge1"] == 0.0


def test_a_library_that_is_not_there_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(NxdtError, match=r"E005.*ROUGE figures need rouge-score(.|\n)*pip install 'rouge-score'"):
        Rouge()


def test_evaluate_reports_it(tmp_path, capsys):
    config = load("recipe:llama-tiny", [*SMALL, f"exp_manager.exp_dir={tmp_path}", "trainer.max_steps=1"])
    train(config)
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "In the", "answer": "beginning"}\n')
    capsys.readouterr()
    assert main(["evaluate", str(config.run_dir / "checkpoints"), str(file), "--max-new-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"step", "records", "unused", "exact_match", "rouge1", "rouge2", "rougeL"}
