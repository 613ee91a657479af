"""Samples: what is in them, in which order, and which records are in none."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from nxdt_plugin_sft_chat.config import ChatConfig, ChatSource
from nxdt_plugin_sft_chat.errors import (
    ChatTooLong,
    EmptySplit,
    EverythingTrained,
    NothingTrained,
)
from nxdt_plugin_sft_chat.loader import ChatData
from nxdt_testing.dataset_contract import take_steps
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.errors.chats import (
    NotAChatTokenizer,
    SpecialTokenInText,
    TemplateMissing,
    TemplateNeedsToken,
    TemplateUnknown,
    TooManyBadRecords,
)
from nxdt_core.errors.data import DataFileNotFound, DataNeedsTokenizer, MixtureInSequence
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset
from nxdt_core.protocols.tokenizer import Tokenizer

BYTES = ByteTokenizer()


def turn(user, answer, **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer, **more}]}


def conversations(dataset):
    """Each conversation's inputs and labels, as tuples, in the order of the samples."""
    found = []
    for index in range(len(dataset)):
        sample = dataset[index]
        for number in range(sample.document_ids.max() + 1):
            own = sample.document_ids == number
            assert sample.position_ids[own].tolist() == list(range(own.sum()))
            found.append((tuple(sample.input_ids[own].tolist()), tuple(sample.labels[own].tolist())))
    return found


def learnt(tokenizer, dataset):
    """The text that each conversation is trained on."""
    return [tokenizer.spell([i for i in labels if i != IGNORE_INDEX]) for _, labels in conversations(dataset)]


def test_the_pieces_are_what_they_are_called(load, chats_file):
    dataset = load(chats_file, seq_length=512)
    assert isinstance(dataset, MapDataset)
    assert issubclass(ChatData, DatasetSplits)


def test_a_conversation_is_padded_with_what_nobody_sees_or_learns(load, write, tokenizer):
    dataset = load(write(turn("Hi", "Hello")), seq_length=32)
    sample = dataset[0]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
    ids = tokenizer.encode(text + "\n")
    used = len(ids) - 1
    assert sample.input_ids.tolist() == ids[:-1] + [tokenizer.pad_id] * (32 - used)
    assert sample.document_ids.tolist() == [0] * used + [-1] * (32 - used)
    assert (sample.labels[used:] == IGNORE_INDEX).all()
    assert learnt(tokenizer, dataset) == ["Hello<|im_end|>"]
    assert all(array.dtype == np.int64 for array in (sample.input_ids, sample.labels, sample.position_ids))


def test_packing_moves_conversations_and_changes_none(load, chats_file, tokenizer):
    alone, packed = (load(chats_file, seq_length=512, packing=packing) for packing in (False, True))
    assert len(packed) < len(alone) / 4
    assert sorted(conversations(packed)) == sorted(conversations(alone))
    for index in range(len(packed)):
        documents = packed[index].document_ids
        assert (np.diff(documents[documents >= 0]) >= 0).all()
        assert documents[0] == 0
    assert alone.report().efficiency * len(alone) == pytest.approx(packed.report().efficiency * len(packed))


def test_packs_depend_on_the_seed_alone(load, chats_file):
    first, again, other = (load(chats_file, seq_length=512, packing=True, seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert conversations(first) == conversations(again) != conversations(other)
    assert len(first) == len(other)


def test_a_run_goes_on_exactly_on_other_ranks_with_workers(load, chats_file):
    def steps(rank, size, state=None, count=8, workers=0):
        dataset = load(chats_file, seq_length=512, packing=True)
        read, behind = take_steps(
            dataset, count, global_batch_size=4, seed=3, rank=rank, size=size, state=state, workers=workers
        )
        found = [
            torch.stack([torch.cat([b.input_ids, b.labels, b.position_ids, b.document_ids]) for b in batches])
            for batches in read
        ]
        return torch.stack(found), behind

    whole, _ = steps(0, 1)  # 20 samples: the second epoch begins within it
    _, state = steps(0, 1, count=3, workers=2)
    for size in (2, 4):
        parts = [steps(rank, size, state, count=5, workers=rank)[0] for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim=1), whole[3:])
    assert not torch.equal(whole[:5], torch.cat([whole[5:], whole[:2]])), "the second epoch has another order"


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ({}, "Hello there.<|im_end|>4<|im_end|>"),
        ({"train_turns": "last"}, "4<|im_end|>"),
        ({"train_roles": ("user",)}, "Hi<|im_end|>2+2?<|im_end|>"),
        ({"train_roles": ("user", "assistant")}, "Hi<|im_end|>Hello there.<|im_end|>2+2?<|im_end|>4<|im_end|>"),
        ({"train_roles": ("user", "assistant"), "train_turns": "last"}, "4<|im_end|>"),
        ({"train_roles": ("system",)}, "Be brief.<|im_end|>"),
    ],
)
def test_roles_and_turns_decide_what_is_trained(keys, trained, load, write, tokenizer, talk):
    assert learnt(tokenizer, load(write(talk), **keys)) == [trained]


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({2: False}, "4<|im_end|>"),
        ({4: False}, "Hello there.<|im_end|>"),
        ({1: True}, "Hi<|im_end|>Hello there.<|im_end|>4<|im_end|>"),
        ({2: True, 4: False, 3: True}, "Hello there.<|im_end|>2+2?<|im_end|>"),
    ],
)
def test_a_message_says_for_itself_whether_it_is_trained(flags, trained, load, write, tokenizer, talk):
    messages = [dict(message) for message in talk["messages"]]
    for number, flag in flags.items():
        messages[number]["train"] = flag
    assert learnt(tokenizer, load(write({"messages": messages}))) == [trained]


def test_calls_of_functions_are_trained_and_their_results_are_not(load, write, tokenizer, call):
    (found,) = learnt(tokenizer, load(write(call)))
    assert found.startswith('<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>Half')
    assert "12:30" not in found


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\nEND\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template without special tokens."""


def test_bytes_are_tokens_enough(load, write):
    dataset = load(write(turn("Hé", "Ça 🙂!")), tokenizer=BYTES, chat_template=PLAIN)
    assert learnt(BYTES, dataset) == ["Ça 🙂!\nEND"]
    assert dataset[0].input_ids[-1] == BYTES.pad_id


def long(words):
    return turn("Count", " ".join(["one"] * words))


def test_a_conversation_that_is_too_long_is_refused_with_its_place(load, write):
    path = write(turn("Hi", "Hello"), long(50), long(90))
    with raises(ChatTooLong, match=r"chats\.jsonl:2: the conversation has \d+ tokens; sequences of 48 hold 49\.") as e:
        load(path, seq_length=48)
    assert "first of 2 so long" in str(e.value)
    assert "keep_start and keep_end" in str(e.value)


def test_a_conversation_fits_to_the_last_token(load, write, tokenizer):
    path = write(long(20))
    length = int(load(path, seq_length=256).report().lengths[0])
    assert len(load(path, seq_length=length - 1)) == 1
    with raises(ChatTooLong):
        load(path, seq_length=length - 2)


def test_what_is_too_long_is_cut_at_the_named_end(load, write, tokenizer):
    path = write(turn("Count to three.", "one two three " * 8))
    ((whole, _),) = conversations(load(path))
    length = len(whole) - 10
    datasets = [load(path, seq_length=length, truncation=truncation) for truncation in ("keep_start", "keep_end")]
    ((start, starting),), ((end, ending),) = map(conversations, datasets)
    assert start == whole[:length]
    assert end == whole[-length:]
    assert starting[-1] == whole[length]
    assert [id_ for id_ in ending if id_ != IGNORE_INDEX][-1] == tokenizer.eos_id
    assert [dataset.report().truncated for dataset in datasets] == [1, 1]


def test_dropped_records_are_counted_and_told(load, write, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = load(
            write(turn("Hi", "Hello"), long(50), turn("Ho", "no", train=False)), seq_length=48, truncation="drop"
        )
    report = dataset.report()
    assert len(dataset) == report.records == 1
    assert dict(report.left_out) == {"longer than a sequence": 1, "their marks leave nothing to train": 1}
    assert "left out 1 record: longer than a sequence" in caplog.text


@pytest.mark.parametrize(
    ("records", "keys", "reason"),
    [
        ([turn("a", "b", train=False)], {}, "of 1 records, their marks leave nothing to train"),
        ([{**turn("a", "b"), "weight": 0}], {}, "of 1 records, their marks leave nothing to train"),
        ([long(50)], {"truncation": "drop", "seq_length": 32}, "longer than a sequence"),
        (
            [turn("a" * 400, "b")],
            {"truncation": "keep_start", "seq_length": 32},
            "truncation removes all their trained tokens",
        ),
    ],
)
def test_a_set_in_which_nothing_is_trained_is_refused(records, keys, reason, load, write):
    with raises(NothingTrained, match="Nothing of the train data would be trained") as caught:
        load(write(*records), **keys)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {}),
        (turn("a", "b"), {"train_roles": ("tool",)}),
    ],
    ids=["no answer", "no message of the roles"],
)
def test_a_conversation_without_an_answer_is_a_bad_record_unless_it_is_marked(record, keys, load, write, call):
    path = write(call, call, record, call)
    with raises(NothingTrained, match=r"chats\.jsonl:3 would be trained: there is no message of '[a-z]+'"):
        load(path, **keys)
    with raises(TooManyBadRecords, match=r"1 of 4 records"):
        load(path, bad_records="drop", **keys)
    dropped = load(path, bad_records="drop", max_bad_share=0.5, **keys)
    assert (len(dropped), dropped.report().left_out) == (3, {"they cannot be used": 1})
    assert "chats.jsonl:3" in dropped.report().bad[0]
    assert load(write(call, {**record, "weight": 0}), **keys).report().left_out == {
        "their marks leave nothing to train": 1
    }


def test_a_set_in_which_everything_is_trained_is_refused(load, write, tmp_path):
    answers = "{% for m in messages if m.role == 'assistant' %}"
    template = tmp_path / "answers.jinja"
    template.write_text(answers + "{% generation %}{{ m.content }}|{% endgeneration %}{% endfor %}")
    with raises(EverythingTrained, match="All 1 tokens of the train data would be trained, prompts included"):
        load(write(turn("a", "b")), tokenizer=BYTES, chat_template_file=template)


def test_one_file_is_split_by_its_own_seed(load, chats_file):
    def texts(split, **keys):
        return {
            found
            for found, _ in conversations(load(chats_file, split, seq_length=512, validation_fraction=0.2, **keys))
        }

    train, validation = texts("train"), texts("validation")
    assert len(validation) == 22
    assert len(train) == 89
    assert not train & validation
    assert texts("validation", seed=9) == validation != texts("validation", split_seed=1)
    assert load(chats_file, "test", seq_length=512, validation_fraction=0.2) is None


def test_only_the_first_records_are_used_where_that_is_asked_for(load, chats_file):
    few, all_ = (load(chats_file, seq_length=512, dev_choose_samples=n) for n in (5, 10_000))
    assert conversations(few) == conversations(all_)[:5]
    assert len(all_) == 111


def test_a_share_of_too_few_records_is_refused(load, write):
    path = write(turn("a", "b"), turn("c", "d"))
    with raises(EmptySplit, match=r"0\.1 of 2 records leaves none to validation"):
        load(path, validation_fraction=0.1)


def test_the_fingerprint_knows_all_that_decides_a_sample(load, write, talk):
    path, other = write(talk, turn("a", "b")), write(talk, turn("a", "c"), name="other.jsonl")
    copy = write(talk, turn("a", "b"), name="copy.jsonl")
    variants = [
        {"path": path},
        {"path": other},
        {"path": path, "chat_template": "zephyr"},
        {"path": path, "train_turns": "last"},
        {"path": path, "train_roles": ("user",)},
        {"path": path, "packing": True},
        {"path": path, "seq_length": 255},
        {"path": path, "truncation": "drop"},
        {"path": path, "template_options": {"x": 1}},
        {"path": path, "validation_fraction": 0.5},
        {"path": path, "dev_choose_samples": 1},
        {"path": path, "tokenizer": BYTES, "chat_template": PLAIN},
    ]
    found = [load(**keys).fingerprint() for keys in variants]
    assert len(set(found)) == len(found)
    assert load(copy).fingerprint() == found[0]


def test_the_report_counts_tokens_by_role_and_turn(load, write, tokenizer, talk):
    report = load(write(talk, turn("Hi", "Hello")), train_turns="last").report()
    words = {role: count.tokens for role, count in report.by_role.items()}
    assert words["system"] == len(tokenizer.encode("Be brief."))
    assert words["user"] == len(tokenizer.encode("Hi")) * 2 + len(tokenizer.encode("2+2?"))
    assert sum(words.values()) == report.tokens.tokens == report.lengths.sum()
    first, second = report.by_turn
    assert first.trained == len(tokenizer.encode("Hello")) + 1
    assert second.trained == second.tokens == len(tokenizer.encode("4")) + 1
    assert report.tokens.trained == first.trained + second.trained


@pytest.mark.parametrize("token", ["<|im_end|>", "<|pad|>"])
def test_texts_that_spell_special_tokens_are_refused_unless_allowed(token, load, write, tokenizer):
    path = write(turn("a", "b"), turn(f"say {token}", "b"))
    with raises(SpecialTokenInText, match=r"chats\.jsonl:2, message 1: .* spells the special token"):
        load(path)
    assert tokenizer.encode(token)[0] in load(path, special_tokens_in_text=True)[1].input_ids.tolist()


def test_packed_sequences_are_in_the_order_of_their_first_records(load, write, tokenizer):
    records = [{"input": f"Number {n}?", "output": f"{n} " * (n % 7 + 1)} for n in range(40)]
    dataset = load(write(*records), packing=True)
    texts = [tokenizer.spell(dataset[index].input_ids.tolist()) for index in range(len(dataset))]
    found = [[int(number) for number in re.findall(r"Number (\d+)", text)] for text in texts]
    assert found == sorted(map(sorted, found))
    assert len(found) > 3
    assert found[0][0] == 0


def test_calls_and_tools_that_spell_special_tokens_are_refused(load, write, call):
    calls = json.loads(json.dumps(call))
    calls["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"zone": ["<|im_end|>"]}
    with raises(SpecialTokenInText, match=r"chats\.jsonl:1, message 2: "):
        load(write(calls))
    tools = json.loads(json.dumps(call))
    tools["tools"][0]["function"]["description"] = "<|im_start|>"
    with raises(SpecialTokenInText, match=r"chats\.jsonl:1, its tools: "):
        load(write(tools))


class WithoutTemplate(ByteTokenizer):
    vocab_size = 300


class WithoutPlaces(ByteTokenizer):
    """What every tokenizer has, and no more."""

    locate = Tokenizer.locate


def test_tokenizers_that_cannot_serve_are_refused(load, chats_file):
    with raises(DataNeedsTokenizer):
        load(chats_file, tokenizer=None)
    with raises(NotAChatTokenizer, match="WithoutPlaces"):
        load(chats_file, tokenizer=WithoutPlaces())
    with raises(TemplateMissing, match="'chatml'"):
        load(chats_file, tokenizer=BYTES)
    with raises(TemplateNeedsToken, match="writes eos_token, and the tokenizer has no such token"):
        load(chats_file, tokenizer=BYTES, chat_template="plain")
    with raises(TemplateNeedsToken, match=r"\(chatml\) writes <\|im_end\|>, .* has no such token\.\n  Add <"):
        load(chats_file, tokenizer=BYTES, chat_template="chatml")
    bracketed = "{% for m in messages %}{{ m.content }}[/END]{% endfor %}"
    with raises(TemplateNeedsToken, match=r"writes \[/END\]"):
        load(chats_file, chat_template=bracketed)
    with raises(TemplateUnknown, match=r"no chat template 'chatlm'[\s\S]*Did you mean 'chatml'"):
        load(chats_file, chat_template="chatlm")


@pytest.mark.parametrize("packing", [True, False])
def test_weights_of_messages_are_weights_of_their_tokens(packing, write, load, talk):
    turns = [dict(turn) for turn in talk["messages"]]
    plain = load(write({"messages": turns}), packing=packing)[0]
    turns[2]["weight"] = 0.25
    weighed = load(write({"messages": turns}), packing=packing)[0]
    assert plain.loss_weights is None
    assert np.array_equal(plain.labels, weighed.labels)
    trained = np.flatnonzero(plain.labels != IGNORE_INDEX)
    first = trained[: np.flatnonzero(np.diff(trained) > 1)[0] + 1]
    wanted = np.where(plain.labels != IGNORE_INDEX, 1.0, 0.0)
    wanted[first] = 0.25
    assert weighed.loss_weights.tolist() == wanted.tolist()


def test_a_record_s_weight_is_that_of_its_tokens_and_0_leaves_it_out(write, load, talk):
    records = [{**talk, "weight": weight} for weight in (1, 2.5, 0)]
    data = load(write(*records), packing=False)
    assert len(data) == 2
    plain, weighed = data[0], data[1]
    assert np.array_equal(plain.labels, weighed.labels)
    trained = plain.labels != IGNORE_INDEX
    assert plain.loss_weights.tolist() == np.where(trained, 1.0, 0.0).tolist()
    assert weighed.loss_weights.tolist() == np.where(trained, 2.5, 0.0).tolist()


OTHER = "{% for m in messages %}{{ m.role }}: {{ m.content }}|\n{% endfor %}"


def test_sources_are_mixed_by_weight_each_with_its_own_keys(write, tokenizer, talk):
    chats = write(*[talk] * 6, name="chats.jsonl")
    pairs = write(*[{"problem": "p", "solution": f"s{n}"} for n in range(9)], name="pairs.jsonl")
    sources = {
        "chats": ChatSource(train_files=(chats,), validation_files=(chats,), weight=1, chat_template=OTHER),
        "pairs": ChatSource(
            train_files=(pairs,),
            validation_files=(pairs,),
            weight=3,
            columns={"prompt": "problem", "completion": "solution"},
            dev_choose_samples=4,
        ),
    }
    context = DataContext(seq_length=256, seed=1, tokenizer=tokenizer)
    data = ChatData(ChatConfig(sources=sources), context)
    train = data.split("train")
    texts = [tokenizer.decode(train[index].input_ids.tolist()) for index in range(len(train))]
    asked = [text for text in texts if "user: " in text]
    assert (len(asked), len(texts)) == (6, 24)
    others = [text for text in texts if "user: " not in text]
    counts = [sum(f"s{n}" in text for text in others) for n in range(9)]
    assert counts[4:] == [0] * 5
    assert max(counts) - min(counts[:4]) <= 1
    assert [*data.split("validation")] == ["chats", "pairs"]
    assert data.split("test") is None
    missing = {**sources, "pairs": ChatSource(train_files=(pairs.with_name("none.jsonl"),))}
    with raises(DataFileNotFound, match=r"data\.sources\.pairs\.train_files"):
        ChatData(ChatConfig(sources=missing), context).split("train")
    with raises(MixtureInSequence, match="'chats', 'pairs'"):
        ChatData(ChatConfig(sources=sources), replace(context, shuffle=False)).split("train")
