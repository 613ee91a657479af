"""What a validation tells beside one number: each set by itself, and what the model writes; and nxdt evaluate."""

from __future__ import annotations

import json
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxdt_core.builtins.tokenizer_byte import ByteTokenizer
from nxdt_core.builtins.tokenizer_config import HuggingFaceTokenizerConfig
from nxdt_core.builtins.tokenizer_huggingface import HuggingFaceTokenizer
from nxdt_core.cli import main
from nxdt_core.config.paths import resolve_path
from nxdt_core.data.chat_keys import ChatKeys
from nxdt_core.errors import NxdtError
from nxdt_core.training.evaluate import Answer, Question, questions, scores
from nxdt_core.training.run import train

CHAT = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps that validated two sets and wrote behind two prompts."""
    from nxdt_core.config import load
    from tests.training.small import SMALL

    where = tmp_path_factory.mktemp("judged")
    for name, text in (("digits", "0123456789 " * 40), ("words", "In the beginning was the word. " * 90)):
        (where / f"{name}.txt").write_text(text)
    config = load(
        "recipe:llama-tiny",
        [
            *SMALL,
            f"exp_manager.exp_dir={where}",
            *("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=null"),
            "data.validation_fraction=0",
            f"data.validation_sets={{digits: [{where}/digits.txt], words: [{where}/words.txt]}}",
            "trainer.callbacks=[{name: generations, prompts: [In the, And], max_new_tokens: 5}]",
        ],
    )
    train(config)
    return config


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_validation_set_has_a_loss_and_a_perplexity(trained):
    (row,) = lines(trained.run_dir / "validation.jsonl")
    sets = row["sets"]
    assert list(sets) == ["digits", "words"]
    assert sets["digits"]["loss"] != sets["words"]["loss"]
    assert row["tokens"] == sum(figures["tokens"] for figures in sets.values())
    mean = sum(figures["loss"] * figures["tokens"] for figures in sets.values()) / row["tokens"]
    assert row["loss"] == pytest.approx(mean, rel=1e-9)
    for figures in (row, *sets.values()):
        assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]), rel=1e-9)


def test_loggers_have_them_and_the_texts_that_were_written(trained):
    events = EventAccumulator(str(trained.run_dir))
    events.Reload()
    names = {"val_loss", "val_perplexity", *(f"val_{kind}/{one}" for kind in ("loss", "perplexity")
                                             for one in ("digits", "words"))}  # fmt: skip
    assert names <= set(events.Tags()["scalars"])
    written = lines(trained.run_dir / "generations.jsonl")
    assert [(row["step"], row["prompt"]) for row in written] == [(2, "In the"), (2, "And")]
    texts = [events.Tensors(f"generations/{number}/text_summary")[0] for number in range(2)]
    for row, text in zip(written, texts, strict=True):
        assert text.step == 2
        assert row["text"] in text.tensor_proto.string_val[0].decode("utf-8", "replace")


def test_evaluate_prints_what_the_library_finds(trained, tmp_path, capsys):
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "In the", "answer": "beginning"}\n{"prompt": "And", "answer": "the earth"}\n')
    uri = str(trained.run_dir / "checkpoints")
    assert main(["evaluate", uri, str(file), "--max-new-tokens", "4", "--limit", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2
    assert found["records"] == 1
    assert set(found) == {"step", "records", "exact_match", "rouge1", "rouge2", "rougeL"}
    assert main(["evaluate", uri, str(file), "--max-new-tokens", "2", "--show", "1"]) == 0
    assert f"{file}:1\n  wanted: beginning\n  given:" in capsys.readouterr().out


def test_scores_are_means_of_exact_matches_and_of_rouge():
    pairs = [("the cat sat", "the cat sat"), ("the cat sat", "the cat"), ("the cat sat", "dogs")]
    answers = [Answer(question=Question(place="", ids=[1], wanted=wanted), given=given) for wanted, given in pairs]
    found = scores(answers)
    assert found["exact_match"] == pytest.approx(1 / 3)
    assert found["rouge1"] == pytest.approx((1 + 2 * (1 * 2 / 3) / (1 + 2 / 3) + 0) / 3)
    assert found["rouge2"] == pytest.approx((1 + 2 * (1 * 1 / 2) / (1 + 1 / 2) + 0) / 3)


def test_questions_are_rendered_as_the_chat_template_asks_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=CHAT))
    theirs = transformers.AutoTokenizer.from_pretrained(CHAT)
    asked = {"role": "user", "content": "Where is it?"}
    file = tmp_path / "chats.jsonl"
    records = ({"messages": [asked, {"role": "assistant", "content": " There. "}]}, {"input": "Hi", "output": "Yes"})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    one, other = questions([file], tokenizer, ChatKeys())
    assert list(one.ids) == theirs.apply_chat_template([asked], add_generation_prompt=True, return_dict=False)
    assert (one.wanted, other.wanted) == ("There.", "Yes")


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"prompt": "x"}, "NXDT-E003"),
        ({"prompt": "x", "answer": " "}, "NXDT-E003"),
        ({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}, "NXDT-E003"),
        ({"input": "a", "output": "b"}, "NXDT-E001"),
    ],
)
def test_records_that_cannot_be_judged_are_named(tmp_path, record, code):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(NxdtError, match=code) as raised:
        list(questions([file], ByteTokenizer(), ChatKeys()))
    assert f"{file}:1" in raised.value.what()


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(NxdtError, match=r"E005.*ROUGE figures need rouge-score(.|\n)*nxdt-core\[evaluate\]"):
        scores([Answer(question=Question(place="", ids=[1], wanted="a"), given="b")])


def test_nothing_to_judge_by_is_an_error(trained, capsys):
    assert main(["evaluate", str(trained.run_dir / "checkpoints")]) == 2
    assert "NXDT-E004" in capsys.readouterr().err
