"""Records become rows: what is prompt, what is answer, what is cut; and losses count pairs, packed or not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from nxdt_plugin_preference.config import DpoConfig, OrpoConfig, PreferenceConfig, UnpairedConfig
from nxdt_plugin_preference.errors import PairTooLong
from nxdt_plugin_preference.loader import PreferenceData, TruncatedPairs, UnpairedData
from nxdt_plugin_preference.objectives import Dpo, Orpo
from nxdt_plugin_preference.rendering import Pair, read_preference
from nxdt_testing.errors import raises

from nxdt_core.data.chat.templates import shipped_template
from nxdt_core.data.files.records import Place
from nxdt_core.data.loader import blank_like, collate
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors.chats import FieldsUnused
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DataContext
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.system.paths import resolve_path

TOKENIZER = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where is my order?"}]
CUT, PLACE = {"truncation_mode": "keep_start"}, Place(path="a.jsonl", number=1)
YES, NO = ({"role": "assistant", "content": text} for text in ("On its way.", "No idea."))


def loader(tokenizer=None, seq_length=16, **settings):
    context = DataContext(seq_length=seq_length, seed=0, tokenizer=tokenizer or ByteTokenizer())
    return PreferenceData(PreferenceConfig(**settings), context)


def chat_tokenizer():
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=TOKENIZER))


def answers(sample, tokenizer):
    """The text that the loss is on, of each row."""
    rows = zip(sample.labels, sample.loss_weights, strict=True)
    return [tokenizer.spell(labels[weights > 0].tolist()) for labels, weights in rows]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
        {"prompt": ASKED, "chosen": YES["content"], "rejected": NO["content"]},
        {"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": ASKED, "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": f"{ASKED[1]['content']}\n", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"system": "Be short.", "prompt": ASKED[1:], "chosen": [YES], "rejected": [NO]},
        {"system": "Be short.", "prompt": ASKED[1]["content"], "chosen": [YES], "rejected": NO["content"]},
        {
            "prompt": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in ASKED],
            "chosen": [YES],
            "rejected": [NO],
        },
    ],
    ids=[
        *("answers are turns", "answers are texts", "whole conversations", "whole conversations and messages"),
        *("whole conversations and a text", "a system text", "the prompt is a text", "parts of texts"),
    ],
)
def test_every_form_of_a_record_gives_the_turns_that_transformers_renders(write, record):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    ours = chat_tokenizer()
    sample = loader(ours, seq_length=64, train_files=(write([record]),)).split("train")[0]
    for row, answer in enumerate((YES, NO)):
        whole = theirs.apply_chat_template([*ASKED, answer], return_dict=False)
        assert sample.input_ids[row][: len(whole)].tolist()[:-1] == whole[:-1]  # what follows the turn is cut off
        prompt = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        assert answers(sample, ours)[row] == f"{answer['content']}<|im_end|>"
        assert int(np.argmax(sample.loss_weights[row] > 0)) == len(prompt) - 1


def test_calls_and_tools_may_be_given_as_their_json(write):
    call, other = ({"type": "function", "function": {"name": "where", "arguments": {"x": x}}} for x in (1, 2))
    tools = [{"type": "function", "function": {"name": "where"}}]
    written = [{"function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
               for each in (call, other)]  # fmt: skip
    ours = chat_tokenizer()
    found = []
    for (one, two), schemas in (((call, other), tools), (written, json.dumps(tools))):
        answer = [
            {"role": "assistant", "content": None, "tool_calls": [{**one, "id": "a"}, {**two, "id": "b"}]},
            {"role": "tool", "content": "There.", "tool_call_id": "b"},
            {"role": "tool", "content": "Here.", "tool_call_id": "a"},
            YES,
        ]
        wrong = [{"role": "assistant", "tool_calls": [two]}]
        record = {"prompt": ASKED[1:], "chosen": answer, "rejected": wrong, "tools": schemas}
        found.append(loader(ours, seq_length=192, train_files=(write([record]),)).split("train")[0])
    assert np.array_equal(found[0].input_ids, found[1].input_ids)
    chosen, rejected = answers(found[1], ours)
    assert '"arguments": {"x": 1}' in chosen
    assert 0 < chosen.find("Here.") < chosen.find("There.")  # in the order of the calls
    assert chosen.endswith("On its way.<|im_end|>")
    assert '"arguments": {"x": 2}' in rejected


def test_fields_of_a_pair_that_nothing_uses_are_counted_or_refused(write, tmp_path, caplog):
    template = tmp_path / "answers.jinja"
    template.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}")
    texts = {"prompt": "a", "chosen": "b", "rejected": "c", "system": "S", "tools": [{"name": "f"}], "margin": 0.5}
    reasoned = {**YES, "reasoning_content": "It left."}
    turns = {"prompt": ASKED, "chosen": [reasoned], "rejected": [NO], "tools": [{"name": "f"}], "url": ["x.png"]}
    same = {
        "chosen": [*ASKED, {**YES, "train": False}],
        "rejected": [*ASKED, NO],
        "system": "Be long.",
        "chosen_score": 2,
    }
    asked = {"prompt": "Where?", "chosen": [YES], "rejected": [NO], "images": []}
    file = write([texts, turns, same, asked])
    keys = {"seq_length": 96, "chat_template_file": template, "train_files": (file,)}
    unused = {"system": 2, "system messages": 2, "tools": 2}
    ones = ("chosen_score", "margin", "messages.reasoning_content", "messages.train", "url")
    assert loader(chat_tokenizer(), **keys).split("train").report().unused == {**unused, **dict.fromkeys(ones, 1)}
    assert "train data: unused: system in 2 records, system messages in 2 records, tools in 2 records" in caplog.text
    assert "margin in 1 record" in caplog.text
    with raises(FieldsUnused, match=r"pairs\.jsonl:1: .* uses 'system', 'tools', 'margin'"):
        loader(chat_tokenizer(), unused_fields="refuse", **keys).split("train")
    assert loader(chat_tokenizer(), seq_length=96, train_files=(write([asked]),)).split("train").report().unused == {}


def test_a_template_may_know_calls_by_content_that_is_null(write, tmp_path):
    template = tmp_path / "null.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }};"
        "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": name}}]} for name in ("find", "guess")]
    record = {"prompt": "Where?", "chosen": calls[:1], "rejected": calls[1:]}
    ours = chat_tokenizer()
    dataset = loader(ours, seq_length=32, train_files=(write([record]),), chat_template_file=template).split("train")
    assert [text.removesuffix(";") for text in answers(dataset[0], ours)] == ["find", "guess"]


def test_a_shipped_template_is_taken_by_name_as_transformers_takes_its_text(write):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    theirs.chat_template = shipped_template("zephyr").text
    record = {"prompt": ASKED, "chosen": [YES], "rejected": [NO]}
    ours = chat_tokenizer()
    keys = {"seq_length": 96, "chat_template": "zephyr", "train_files": (write([record]),)}
    sample = loader(ours, **keys).split("train")[0]
    for row, answer in enumerate((YES, NO)):
        whole = theirs.apply_chat_template([*ASKED, answer], tokenize=False).rstrip()
        wanted = theirs(whole, add_special_tokens=False)["input_ids"]
        assert sample.input_ids[row][: len(wanted)].tolist() == wanted
        assert answers(sample, ours)[row].removesuffix(theirs.eos_token) == answer["content"]


def test_templates_are_told_the_configured_day_and_options(write, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}{{ mood }}|{% for m in messages %}{{ m.content }}|{% endfor %}", encoding="utf-8"
    )
    record = {"prompt": ASKED, "chosen": [YES], "rejected": [NO]}
    keys = {"chat_template_file": template, "template_options": {"mood": " fine"}, "train_files": (write([record]),)}
    ours = chat_tokenizer()
    told, later = (
        loader(ours, seq_length=64, **keys, **more).split("train") for more in ({}, {"template_date": "2025-01-02"})
    )
    assert ours.decode(told[0].input_ids[0]).startswith("26 Jul 2024 fine|Be short.|")
    assert ours.decode(later[0].input_ids[0]).startswith("02 Jan 2025 fine|")
    assert told.fingerprint() != later.fingerprint()


def test_texts_end_with_the_end_token_and_begin_with_the_begin_token_where_that_is_asked_for(write):
    record = {"prompt": "ab", "chosen": "c", "rejected": "de"}
    file = write([record])
    assert loader(train_files=(file,), seq_length=5).split("train")[0].input_ids.tolist() == [
        [97, 98, 99, 257, 258],
        [97, 98, 100, 101, 257],
    ]
    sample = loader(train_files=(file,), seq_length=8, add_bos=True).split("train")[0]
    assert sample.input_ids.tolist() == [[256, 97, 98, 99, 257, 258, 258, 258], [256, 97, 98, 100, 101, 257, 258, 258]]
    assert sample.labels[0].tolist() == [97, 98, 99, 257, -100, -100, -100, -100]
    assert sample.padding.tolist() == (sample.input_ids == 258).tolist()
    assert sample.loss_weights.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0]]


def test_answers_of_packed_pairs_share_a_number_and_positions_restart(write):
    records = [{"prompt": "ab", "chosen": "c", "rejected": "de"}, {"prompt": "f", "chosen": "ghi", "rejected": "j"}]
    dataset = loader(train_files=(write(records),), packing=True, seq_length=12, add_bos=True).split("train")
    assert len(dataset) == 1
    sample = dataset[0]
    first = 0 if sample.input_ids[0][1] == ord("a") else 1
    lengths = [(5, 6), (6, 4)]  # with begin and end
    for row in (0, 1):
        ahead, behind = lengths[first][row], lengths[1 - first][row]
        padding = 12 - ahead - behind
        assert sample.document_ids[row].tolist() == [0] * ahead + [1] * behind + [-1] * padding
        assert sample.position_ids[row].tolist() == [*range(ahead), *range(behind)] + [0] * padding
        assert (sample.labels[row][sample.document_ids[row] < 0] == -100).all()
    said = [answers(sample, _Spelling())[row] for row in (0, 1)]
    assert said == [["c|ghi|", "de|j|"], ["ghi|c|", "j|de|"]][first]
    report = dataset.report()
    assert (report.records, report.tokens.tokens, report.tokens.trained) == (2, 21, 11)
    assert report.efficiency == pytest.approx(21 / 24)


class _Spelling:
    """The byte tokenizer, with a bar for the end."""

    def spell(self, ids):
        return "".join("|" if id_ == 257 else chr(id_) for id_ in ids)


@pytest.mark.parametrize(("mode", "prompt"), [("keep_start", [1, 2, 3]), ("keep_end", [4, 5, 6])])
def test_prompts_are_cut_first_and_answers_to_what_is_left(mode, prompt):
    fitting = TruncatedPairs(seq_length=8, max_prompt_length=3, mode=mode)
    long = Pair(prompt=[1, 2, 3, 4, 5, 6], answers=([7] * 3, [8] * 9))
    assert fitting.fit(long, PLACE) == Pair(prompt=prompt, answers=([7] * 3, [8] * 5), cut=True)
    fits = Pair(prompt=[1, 2, 3, 4, 5, 6], answers=([7], [8, 8]))
    assert fitting.fit(fits, PLACE) is fits
    shorter = fitting.fit(replace(long, answers=([7] * 3, [8] * 4)), PLACE)  # no more is cut than needed
    assert shorter == Pair(
        prompt=[1, 2, 3, 4] if mode == "keep_start" else [3, 4, 5, 6], answers=([7] * 3, [8] * 4), cut=True
    )
    with raises(PairTooLong, match="a.jsonl:1 .* 15 tokens, and data.seq_length is 8"):
        TruncatedPairs(seq_length=8, max_prompt_length=3, mode="refuse").fit(long, PLACE)


@pytest.mark.parametrize("kind", ["preference", "unpaired-preference"])
def test_a_prompt_of_messages_loses_words_of_the_user_and_never_the_header(write, kind):
    ours, question = chat_tokenizer(), "When does the library open on each day of the week, in summer and in winter?"
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": question}]
    records = [{"prompt": asked, "chosen": [YES], "rejected": [NO]}] * 2
    context = DataContext(seq_length=64, seed=0, tokenizer=ours)
    data, keys = (PreferenceData, PreferenceConfig) if kind == "preference" else (UnpairedData, UnpairedConfig)

    def samples(length, **more):
        made = data(keys(train_files=(write(records),), **more), replace(context, seq_length=length)).split("train")
        return made.report(), ours.spell(made[0].input_ids[0].tolist()), answers(made[0], ours)[0]

    report, whole, answer = samples(64)
    most = int(report.lengths.max())
    with raises(PairTooLong, match=rf"pairs.jsonl:1 .* have {most} tokens, and data.seq_length is {most - 5}"):
        samples(most - 5)
    report, cut, same = samples(most - 5, truncation_mode="keep_start")
    assert (report.truncated, report.lengths.max(), same) == (len(report.lengths), most - 5, answer)
    begin, end = cut.split("<|im_end|>\n<|im_start|>assistant\n")
    assert whole.startswith(begin)
    assert 0 < len(ours.encode(whole.split(begin)[1].split("<|im_end|>")[0])) <= 6
    assert end == whole.split("assistant\n")[1][: len(end)]


def test_pairs_that_are_cut_alike_are_left_out_and_counted(write, caplog):
    alike = {"prompt": "ab", "chosen": "c" * 40 + "d", "rejected": "c" * 40 + "e"}
    apart = {"prompt": "ab", "chosen": "d" + "c" * 40, "rejected": "c" * 40}
    dataset = loader(train_files=(write([alike, apart, alike]),), **CUT).split("train")
    assert len(dataset) == 1
    assert dataset[0].input_ids[0][2] == ord("d")
    report = dataset.report()
    assert (report.records, report.truncated, list(report.left_out.values())) == (1, 1, [2])
    assert "left out 2 records: " in caplog.text


def test_a_share_of_the_records_validates_whatever_the_seed_of_the_run(write):
    file = write([{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(10)])
    splits = loader(train_files=(file,), validation_fraction=0.3)
    seen = [
        {ByteTokenizer().decode(dataset[index].input_ids[0])[0] for index in range(len(dataset))}
        for dataset in (splits.split("train"), splits.split("validation"))
    ]
    assert [len(part) for part in seen] == [7, 3]
    assert seen[0] | seen[1] == {str(n) for n in range(10)}
    splits = loader(train_files=(file,), validation_fraction=0.12)
    assert [len(splits.split(name)) for name in ("train", "validation")] == [9, 1]


def test_the_fingerprint_follows_what_decides_the_samples(write):
    file = write([{"prompt": "a", "chosen": "yes", "rejected": "no"}])
    prints = [
        loader(**{"train_files": (file,), **settings}).split("train").fingerprint()
        for settings in (
            *({}, {}, {"seq_length": 8}, {"max_prompt_length": 3, **CUT}, {"truncation_mode": "keep_end"}),
            {"packing": True},
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5
    assert [key for key, _ in PreferenceConfig(train_files=(file,), max_prompt_length=3).check()] == [
        "max_prompt_length"
    ]


def pair(seed, lengths):
    """A pair of random tokens and, of each label, log-probabilities of a reference."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 12, (2, 12))
    labels, weights = random.integers(0, 12, (2, 12)), np.zeros((2, 12), np.float32)
    for row, (prompt, end) in enumerate(lengths):
        weights[row, prompt:end] = 1
        labels[row, end:] = -100
    log_probs = -random.random((2, 12)).astype(np.float32)
    return Sample(input_ids=ids, labels=labels, loss_weights=weights, reference_log_probs=log_probs)


@pytest.mark.parametrize("objective", [Dpo(DpoConfig(kl_beta=0.5)), Orpo(OrpoConfig(beta=0.5))], ids=["dpo", "orpo"])
def test_packed_pairs_have_the_loss_and_metrics_of_separate_ones(objective):
    samples = [pair(1, ((2, 5), (2, 6))), pair(2, ((1, 3), (1, 4)))]
    logits = {id(sample): torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(n))
              for n, sample in enumerate(samples)}  # fmt: skip
    apart = objective(torch.cat([logits[id(sample)] for sample in samples]), collate(samples), StepContext())
    first, second = samples
    fields = ("input_ids", "labels", "loss_weights", "reference_log_probs")
    joined = {name: np.concatenate([getattr(s, name)[:, :6] for s in (first, second)], 1) for name in fields}
    joined["document_ids"] = np.repeat([[0, 1]], 6, axis=1).repeat(2, axis=0)
    joined["document_ids"][:, -1] = -1  # padding
    joined["labels"][:, -1] = -100
    rows = torch.cat([logits[id(sample)][:, :6] for sample in samples], 1)
    together = objective(rows, collate([Sample(**joined)]), StepContext())
    assert together.metrics.keys() == apart.metrics.keys()
    if isinstance(objective, Dpo):
        torch.testing.assert_close(together.loss_sum, apart.loss_sum)
        assert float(objective.weight(collate([Sample(**joined)]))) == 2
    for name in ("rewards/chosen", "rewards/margins", "logps/rejected"):
        torch.testing.assert_close(together.metrics[name], apart.metrics[name])


@pytest.mark.parametrize("objective", [Dpo(DpoConfig()), Orpo(OrpoConfig())], ids=["dpo", "orpo"])
def test_blank_pairs_add_nothing(objective):
    real = pair(1, ((2, 5), (2, 6)))
    logits = torch.randn(4, 12, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    filled = collate([real, blank_like(real)])
    with_blank, without = (
        objective(*given, StepContext()) for given in ((logits, filled), (logits[:2], collate([real])))
    )
    assert torch.equal(objective.weight(filled), objective.weight(collate([real])))
    torch.testing.assert_close(with_blank.loss_sum, without.loss_sum)
    with_blank.loss_sum.sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[2:].any()


def test_orpo_has_a_finite_gradient_at_certain_answers():
    real = pair(1, ((2, 5), (2, 6)))
    logits = torch.zeros(2, 12, 12).scatter(2, torch.from_numpy(real.labels).clamp(min=0)[..., None], 200.0)
    logits.requires_grad_()
    Orpo(OrpoConfig())(logits, collate([real]), StepContext()).loss_sum.sum().backward()
    assert logits.grad.isfinite().all()


def test_orpo_gives_a_certain_answer_the_larger_odds():
    """log p of an answer rounds to 0 where its logits lead by more than 17."""
    real = pair(1, ((2, 5), (2, 6)))
    lead = torch.tensor([200.0, 5.0])[:, None, None]
    places = torch.from_numpy(real.labels).clamp(min=0)[..., None]
    logits = torch.zeros(2, 12, 12).scatter(2, places, lead.expand(places.shape))
    odds = Orpo(OrpoConfig())(logits, collate([real]), StepContext()).metrics["log_odds_chosen"]
    assert 20 < float(odds) < 1000


def test_pairs_of_every_format_are_the_same(write, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    records = [
        {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
        {"prompt": ASKED[1:], "chosen": [YES], "rejected": [NO]},
    ]
    (tmp_path / "list.json").write_text(json.dumps(records))
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "pairs.parquet")
    table.save_to_disk(tmp_path / "saved")
    wanted = loader(chat_tokenizer(), seq_length=64, train_files=(write(records),)).split("train")
    for name in ("list.json", "pairs.parquet", "saved"):
        found = loader(chat_tokenizer(), seq_length=64, train_files=(tmp_path / name,)).split("train")
        assert len(found) == len(wanted) == 2
        for index in range(2):
            assert np.array_equal(found[index].input_ids, wanted[index].input_ids)
            assert np.array_equal(found[index].labels, wanted[index].labels)


def test_a_second_run_finds_the_tokens_of_the_first(write, tmp_path, monkeypatch):
    file = write([{"prompt": "a", "chosen": "b", "rejected": "c", "id": 1}, {"prompt": "a", "chosen": "b"}])
    keys = {"cache_dir": tmp_path / "cache", "bad_records": "drop", "max_bad_share": 0.5}

    def opened(**more):
        config = PreferenceConfig(train_files=(file,), **keys, **more)
        context = DataContext(seq_length=16, seed=0, tokenizer=ByteTokenizer())
        return PreferenceData(config, context).split("train")

    first = opened()
    monkeypatch.setattr("nxdt_plugin_preference.loader.Renderer", None)
    second = opened()
    assert second.fingerprint() == first.fingerprint()
    assert np.array_equal(second[0].input_ids, first[0].input_ids)
    one, other = first.report(), second.report()
    assert (one.left_out, one.bad, one.unused) == (other.left_out, other.bad, other.unused)
    assert f"{file}:2 has no 'rejected' answer" in one.bad[0]
    with pytest.raises(TypeError):
        opened(max_prompt_length=4, **CUT)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("Q: Sky?\nA: blue", "Q: Sky?\nA: green, or blue", "Q: Sky?\nA:"),
        ("abc", "abd", "ab"),
    ],
)
def test_texts_without_a_prompt_are_parted_as_trl_parts_them(chosen, rejected, prompt):
    record = {"chosen": chosen, "rejected": rejected}
    pair = read_preference(record, Place(path="a.jsonl", number=1))
    assert pair.prompt == prompt
    trl = pytest.importorskip("trl.data_utils", reason="trl is not installed")
    assert trl.extract_prompt(record) == {"prompt": pair.prompt, **pair.answers}
