"""What a validation tells beside one number: each set by itself, and what the model writes; and nxdt evaluate."""

from __future__ import annotations

import json
import math
import re
import sys
from html import unescape

import datasets
import numpy as np
import pytest
from nxdt_plugin_megatron_data.indexed_files import write_documents
from nxdt_testing.errors import raises
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.files.records import UnusedFields
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors import NxdtError
from nxdt_core.errors.chats import FieldsUnused, SpecialTokenInText
from nxdt_core.protocols.evaluation import Metric
from nxdt_core.run.training import train
from nxdt_core.system.paths import resolve_path
from nxdt_core.system.visible_text import visible
from nxdt_core.train.generate import Question, Sampling, load_model, questions, scores
from tests import processes
from tests.train.small import SMALL

MARKUP = "And\n![b](http://x/c)\r# <img>"
CALL = {"name": "look", "arguments": "{}"}
CHAT = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")


def judged(where):
    """Two steps, the validation of two sets that lie there, and what is written behind two prompts."""
    return (
        *SMALL,
        f"exp_manager.exp_dir={where}",
        *("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=null"),
        "data.validation_fraction=0",
        f"data.validation_sets={{digits: [{where}/digits.txt], words: [{where}/words.txt]}}",
        f"trainer.callbacks=[{{name: generations, prompts: [In the, {json.dumps(MARKUP)}], max_new_tokens: 5}}]",
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that was judged."""
    where = tmp_path_factory.mktemp("judged")
    for name, text in (("digits", "0123456789 " * 20), ("words", "In the beginning was the word. " * 45)):
        (where / f"{name}.txt").write_text(text)
    config = load("recipe:llama-tiny", [*judged(where)])
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
    names = {"val/loss", "val/perplexity", *(f"val/{kind}/{one}" for kind in ("loss", "perplexity")
                                             for one in ("digits", "words"))}  # fmt: skip
    assert names <= set(events.Tags()["scalars"])
    written = lines(trained.run_dir / "generations.jsonl")
    assert [(row["step"], row["prompt"]) for row in written] == [(2, "In the"), (2, MARKUP)]
    texts = [events.Tensors(f"generations/{number}/text_summary")[0] for number in range(2)]
    for row, text in zip(written, texts, strict=True):
        assert text.step == 2
        html = markdown_to_safe_html(text.tensor_proto.string_val[0])
        assert re.findall("<[a-z]+", html) == ["<pre", "<code"]
        assert "".join(visible(row["prompt"] + row["text"]).split()) in "".join(unescape(html).split())


def test_ranks_write_together_what_one_process_writes(trained):
    words = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "name=together")
    where = trained.run_dir.parent
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *judged(where), *words]
    done = processes.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert lines(where / "together/generations.jsonl") == lines(trained.run_dir / "generations.jsonl")


def test_a_prompt_of_a_chat_is_a_users_turn(tmp_path):
    transformers = pytest.importorskip("transformers")
    question = "What is the largest ocean?"
    config = load(
        "recipe:llama-tiny-sft",
        [
            *SMALL,
            f"exp_manager.exp_dir={tmp_path}",
            # Fewer tokens than the prompt has: the model sees as many as it has positions.
            *("data.seq_length=16", "data.truncation=keep_end"),
            *("data.micro_batch_size=1", "data.global_batch_size=2"),
            *("trainer.max_steps=1", "trainer.val_check_interval=1"),  # longer ones say one token alone
            f"trainer.callbacks=[{{name: generations, prompts: [{question}], chat: true, max_new_tokens: 12}}]",
        ],
    )
    train(config)
    assert main(["checkpoint", "export", str(config.run_dir / "checkpoints"), str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    def said(text):
        asked = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        written = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked.input_ids.shape[1] :]
        return tokenizer.decode(written, skip_special_tokens=True)

    turn = [{"role": "user", "content": question}]
    wanted = said(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    assert wanted != said(question)
    assert lines(config.run_dir / "generations.jsonl") == [{"step": 1, "prompt": question, "text": wanted}]


def test_texts_to_go_on_from_need_a_tokenizer_before_anything_is_trained(tmp_path):
    write_documents(tmp_path / "tokens", np.dtype("<u2"), [[np.arange(64, dtype=np.uint16)]] * 40)
    config = load(
        "recipe:gpt-indexed-tiny",
        [
            *SMALL,
            f"exp_manager.exp_dir={tmp_path}",
            *(f"data.data_prefix={tmp_path}/tokens", "data.tokenizer.library=null", "data.splits_string=80,20,0"),
            *("trainer.max_steps=1", "trainer.callbacks=[{name: generations, prompts: [a]}]"),
        ],
    )
    with pytest.raises(NxdtError, match=r"T016.*names no tokenizer"):
        train(config)
    assert not [*config.run_dir.glob("checkpoints/step-*")]


def test_evaluate_prints_what_it_finds(trained, tmp_path, capsys):
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "In the", "answer": "beginning"}\n{"prompt": "And", "answer": "the earth", "id": 1}\n')
    uri = str(trained.run_dir / "checkpoints")
    assert main(["evaluate", uri, str(file), "--max-new-tokens", "4", "--limit", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2
    assert found["records"] == 1
    assert found["unused"] == {}
    assert {"step", "records", "unused", "exact_match"} <= set(found)
    assert main(["evaluate", uri, str(file), "--max-new-tokens", "2", "--show", "1"]) == 0
    said = capsys.readouterr().out
    assert f"{file}:1\n  wanted: beginning\n  given:" in said
    assert "\nunused:       id in 1 record\n" in said


def test_scores_are_the_share_of_exact_matches_and_what_metrics_find():
    class Lengths(Metric):
        def compute(self, wanted, given):
            return {"wanted": float(len(wanted[0])), "given": float(len("".join(given)))}

    wanted, answers = ["the cat"] * 3, ["the cat", "a dog", "cat"]
    assert scores(wanted, answers) == {"exact_match": 1 / 3}
    assert scores(wanted, answers, [Lengths()]) == {"exact_match": 1 / 3, "wanted": 7.0, "given": 15.0}


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
    shared = [{"from": "human", "value": asked["content"]}, {"from": "gpt", "value": "There."}]
    datasets.Dataset.from_list([{"conversations": shared}]).to_parquet(tmp_path / "shared.parquet")
    assert [*questions([tmp_path / "shared.parquet"], tokenizer, ChatKeys())] == [
        Question(place=f"{tmp_path}/shared.parquet:1", ids=one.ids, wanted="There.")
    ]


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"prompt": "x"}, "NXDT-E003"),
        ({"prompt": "x", "answer": " "}, "NXDT-E003"),
        ({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}, "NXDT-D303"),
        ({"messages": [{"role": "user", "content": "b"}]}, "NXDT-E003"),
        ({"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "tool_calls": [CALL]}]}, "NXDT-E003"),
        ({"input": "a", "output": "b"}, "NXDT-E001"),
    ],
)
def test_records_that_cannot_be_judged_are_named(tmp_path, record, code):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(NxdtError, match=code) as raised:
        list(questions([file], ByteTokenizer(), ChatKeys()))
    assert f"{file}:1" in raised.value.what()


def test_fields_of_questions_that_nothing_uses_are_counted_or_refused(tmp_path):
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=CHAT))
    asked, answer = {"role": "user", "content": "Where?", "name": "eve"}, {"role": "assistant", "content": "There."}
    records = (
        {"prompt": "x", "answer": "y", "id": 1},
        {"input": "a", "output": "b", "history": [["c", "d"]], "id": 2},
        {"messages": [asked, {**answer, "reasoning_content": "Near."}], "conversations": [asked]},
    )
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    unused = UnusedFields("report")
    _, other, _ = questions([file], tokenizer, ChatKeys(), unused=unused)
    assert "d<|im_end|>" in tokenizer.spell(other.ids)
    ones = ("conversations", "messages.name", "messages.reasoning_content")
    assert unused.counts == {"id": 2, **dict.fromkeys(ones, 1)}
    with raises(FieldsUnused, match=r"chats\.jsonl:1: .*'id'"):
        list(questions([file], tokenizer, ChatKeys(), unused=UnusedFields("refuse")))


@pytest.mark.parametrize("allowed", [False, True])
def test_a_question_that_spells_a_special_token_is_refused_as_in_training(tmp_path, allowed):
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=CHAT))
    special = max(tokenizer.reserved_tokens(), key=len)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"input": f"What is {special}?", "output": "A sign."}) + "\n")
    found = questions([file], tokenizer, ChatKeys(special_tokens_in_text=allowed))
    if allowed:
        assert tokenizer.locate([special])[0].ids[0] in next(found).ids
        return
    with raises(SpecialTokenInText) as raised:
        next(found)
    assert special in raised.value.what()
    assert f"{file}:1" in raised.value.what()


def test_a_question_that_the_model_cannot_see_whole_is_refused(trained, tmp_path, capsys):
    window, file = trained.selected("model").config.max_position_embeddings, tmp_path / "long.jsonl"
    rows = [{"prompt": "a" * length, "answer": "b"} for length in (window - 1, window)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("evaluate", str(trained.run_dir / "checkpoints"), str(file), "--max-new-tokens", "1")
    assert main([*words]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "NXDT-E009" in said.err
    assert f"{file}:2" in said.err
    assert f"{window} tokens" in said.err
    assert main([*words, "--limit", "1"]) == 0
    assert main([*words, "--limit", "1", "--window", str(window - 1)]) == 2
    assert f"{window - 1} tokens" in capsys.readouterr().err
    assert main([*words, "--window", str(window + 1)]) == 2
    assert f"[NXDT-M052] Sequences have {window + 1} tokens" in capsys.readouterr().err


def test_a_prompt_of_which_the_model_sees_the_end_alone_is_told(trained, caplog):
    window, uri = trained.selected("model").config.max_position_embeddings, str(trained.run_dir / "checkpoints")
    model = load_model(uri)
    list(model.writer.pieces(model.prompt("a" * window), Sampling(max_new_tokens=1)))
    assert "tokens" not in caplog.text
    list(model.writer.pieces(model.prompt("a" * (window + 1)), Sampling(max_new_tokens=1)))
    assert f"{window + 1} tokens; the model sees the last {window}" in caplog.text


def test_nothing_to_judge_by_is_an_error(trained, capsys):
    assert main(["evaluate", str(trained.run_dir / "checkpoints")]) == 2
    assert "NXDT-E004" in capsys.readouterr().err
