"""What is wrong with a record is said with its place and a code, before anything is trained."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from nxdt_plugin_preference.config import DpoConfig, PreferenceConfig
from nxdt_plugin_preference.loader import PreferenceData
from nxdt_plugin_preference.objectives import Dpo

from nxdt_core.config import load
from nxdt_core.data.loader import collate
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DataContext
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.system.paths import resolve_path

GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
USER, OTHER, YES, NO = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("user", "other"), ("assistant", "yes"), ("assistant", "no"))
)


def pairs(file, tokenizer=None, seq_length=16, **settings):
    context = DataContext(seq_length=seq_length, seed=0, tokenizer=tokenizer or ByteTokenizer())
    return PreferenceData(PreferenceConfig(train_files=(file,), **settings), context).split("train")


def chat_tokenizer():
    found = resolve_path("package://nxdt_plugin_sft_chat/data/tokenizer")
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=found))


@pytest.mark.parametrize(
    ("record", "code", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "NXDT-A001", "no 'rejected' answer; its keys are 'prompt', 'chosen'"),
        ({**GOOD, "rejected": None}, "NXDT-A001", "no 'rejected' answer"),
        ({**GOOD, "chosen": "  "}, "NXDT-A002", "The 'chosen' answer"),
        ({**GOOD, "rejected": "b"}, "NXDT-A003", "are the same"),
        ({"chosen": "b", "rejected": "c"}, "NXDT-A004", "the key is not there"),
        ({**GOOD, "prompt": ""}, "NXDT-A004", "it is empty"),
        ({"chosen": [YES], "rejected": [USER, NO]}, "NXDT-A004", "do not begin with the same messages"),
        ({**GOOD, "chosen": 3}, "NXDT-A005", "it is a int"),
        ({"chosen": [USER, {"content": "yes"}], "rejected": [USER, NO]}, "NXDT-D301", "2, 'chosen', message 2"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [NO]}, "NXDT-A007", "begins with a turn of 'user'"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO, USER]}, "NXDT-A007", "ends with a turn of 'user'"),
        ({"prompt": [USER], "chosen": [OTHER, YES], "rejected": [OTHER, NO]}, "NXDT-A007", "begins with a turn"),
        ({"prompt": [USER, USER], "chosen": "a", "rejected": "b"}, "NXDT-D303", "prompt and 'chosen', message 2"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO, NO]}, "NXDT-D303", "prompt and 'rejected', message 3"),
        ({"prompt": [{**USER, "role": "usr"}], "chosen": "a", "rejected": "b"}, "NXDT-D302", "2, 'prompt', message 1"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO], "tools": "{"}, "NXDT-D301", "'tools'"),
        ({**GOOD, "images": ["x.png"]}, "NXDT-D301", "it has 'images'; only text"),
        ({"prompt": "other", "chosen": [USER, YES], "rejected": [USER, NO]}, "NXDT-A008", "not what the user says"),
        ({"prompt": "hi", "chosen": [USER, YES], "rejected": [OTHER, NO]}, "NXDT-A008", "not what the user says"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "NXDT-D313", "no chat template"),
    ],
)
def test_a_record_that_is_no_pair_is_refused_with_its_line(write, record, code, said):
    file = write([GOOD, record])
    with pytest.raises(NxdtError) as raised:
        pairs(file)
    assert raised.value.code == code
    assert f"{file}:2" in raised.value.what()
    assert said in raised.value.what()


def test_messages_may_not_spell_special_tokens_unless_told(write):
    spelled = {"role": "assistant", "content": "yes<|im_end|>"}
    file = write([{"prompt": [USER], "chosen": [spelled], "rejected": [NO]}])
    with pytest.raises(NxdtError, match=r"D321.*:1, message 2.*<\|im_end\|>"):
        pairs(file, chat_tokenizer())
    assert len(pairs(file, chat_tokenizer(), 32, special_tokens_in_text=True)) == 1
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}]}
    for where, record in (
        ("message 2", {"chosen": [call]}),
        ("message 1", {"prompt": [{**USER, "name": "<|im_end|>"}]}),
        ("its tools", {"tools": [{"name": "<|im_end|>"}]}),
    ):
        with pytest.raises(NxdtError, match=rf"D321.*:1, {where}"):
            pairs(write([{"prompt": [USER], "chosen": [YES], "rejected": [NO], **record}]), chat_tokenizer())


def test_a_template_that_raises_is_quoted(write, tmp_path):
    template = tmp_path / "angry.jinja"
    template.write_text("{{ raise_exception('no greetings') }}")
    file = write([{"prompt": [USER], "chosen": [YES], "rejected": [NO]}])
    with pytest.raises(NxdtError, match=r"D316.*:1: .* no greetings"):
        pairs(file, chat_tokenizer(), chat_template_file=template)


def test_a_template_whose_end_of_a_turn_is_no_token_is_refused(write):
    file = write([{"prompt": [USER], "chosen": [YES], "rejected": [NO]}])
    with pytest.raises(NxdtError, match=r"D317.*writes <\|end\|>, and the tokenizer has no such token"):
        pairs(file, chat_tokenizer(), chat_template="{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")


TURNS = "{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{{{ m.tool_calls }}}}{}{{% endfor %}}"


@pytest.mark.parametrize("answer", [YES, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
def test_a_template_that_ends_no_turn_is_refused(write, answer):
    """The model would learn neither from the chosen nor from the rejected answer where to stop."""
    file = write([{"prompt": [USER], "chosen": [answer], "rejected": [NO]}])
    with pytest.raises(NxdtError, match=r"D319.*no text follows an answer"):
        pairs(file, chat_tokenizer(), chat_template=TURNS.format(""))
    assert len(pairs(file, chat_tokenizer(), 64, chat_template=TURNS.format("|"))) == 1


def test_space_that_ends_turns_must_be_a_part_of_the_answers(write):
    file, template = write([{"prompt": [USER], "chosen": [YES], "rejected": [NO]}]), TURNS.format("\n")
    with pytest.raises(NxdtError, match=r"D319.*data\.space_after_turns"):
        pairs(file, chat_tokenizer(), chat_template=template)
    assert len(pairs(file, chat_tokenizer(), chat_template=template, space_after_turns=True)) == 1


def test_answers_that_a_template_leaves_out_or_writes_alike_are_refused(write, tmp_path):
    template = tmp_path / "deaf.jinja"
    template.write_text("{% for m in messages %}{{ m.content | trim }}|{% endfor %}")
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": x}}}]} for x in (1, 2)]
    file = write([{"prompt": [USER], "chosen": calls[:1], "rejected": calls[1:]}])
    with pytest.raises(NxdtError, match=r"D316.*:1: .*leaves out what message 2 of prompt and 'chosen' says or calls"):
        pairs(file, chat_tokenizer(), chat_template_file=template)
    file = write([{"prompt": [USER], "chosen": "yes", "rejected": " yes"}])
    with pytest.raises(NxdtError, match=r"A003.*:1 are the same in tokens"):
        pairs(file, chat_tokenizer(), chat_template_file=template)


def test_a_split_of_which_no_pair_is_left_is_refused_with_numbers(write):
    with pytest.raises(NxdtError, match=r"A013.*each of 2 pairs of train data"):
        pairs(write([{"prompt": "a", "chosen": "b" * 30, "rejected": "b" * 31}] * 2), truncation_mode="keep_start")
    for share, split in ((0.9, "train"), (0.1, "validation")):
        with pytest.raises(NxdtError, match=f"A012.*{share} of 2 records leaves none to {split}"):
            pairs(write([GOOD] * 2), validation_fraction=share)


def test_prompts_that_would_leave_no_answer_are_refused(write):
    with pytest.raises(NxdtError, match=r"A011.*max_prompt_length is 16"):
        pairs(write([GOOD]), max_prompt_length=16)


def test_empty_files_and_lines_that_are_no_json_are_refused(write, tmp_path):
    with pytest.raises(NxdtError, match=r"D305"):
        pairs(write([]))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"\n')
    with pytest.raises(NxdtError, match=r"D005.*broken\.jsonl:1") as raised:
        pairs(broken)
    example = json.loads(raised.value.do().partition("such as ")[2].partition(";")[0])
    assert sorted(example) == sorted(GOOD)


def test_a_preference_loss_refuses_other_data_and_a_reference_that_nobody_is():
    row = np.array([1, 2])
    with pytest.raises(NxdtError, match="A021"):
        Dpo(DpoConfig()).weight(collate([Sample(input_ids=row, labels=row)]))
    batch = collate([Sample(input_ids=np.stack([row, row]), labels=np.stack([row, row]))])
    with pytest.raises(NxdtError, match="A020"):
        Dpo(DpoConfig())(torch.zeros(2, 2, 4), batch, StepContext())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": "ipo", "kl_beta": 0}, "objective.kl_beta.*above 0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "objective.label_smoothing.*must be 0"),
        ({"name": ["dpo"]}, "objective.name.*a list"),
        ({"loss_type": "exo_pair"}, "objective.label_smoothing.*above 0"),
        ({"loss_type": ["sft"]}, "objective.loss_type.*one that compares"),
        ({"loss_type": ["sigmoid", "sigmoid"]}, "objective.loss_type.*each form once"),
        ({"loss_type": ["hinge", "sft"], "loss_weights": [1.0]}, "objective.loss_weights.*1 weights for 2 forms"),
        ({"loss_type": "discopop", "discopop_tau": 0}, "objective.discopop_tau.*above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "objective.label_smoothing.*below 0.5"),
        ({"name": "cpo", "loss_type": "simpo", "beta": 0}, "objective.beta.*above 0"),
        ({"loss_type": "simpo"}, "objective.loss_type.*'sigmoid', 'hinge', 'ipo'"),
    ],
)
def test_options_that_cannot_work_together_are_refused(options, said):
    overrides = [f"objective.{key}={value}" for key, value in options.items() if key != "name"]
    base = f"recipe:llama-tiny-{'orpo' if 'name' in options else 'dpo'}"
    with pytest.raises(NxdtError, match=said):
        load(base, [f"objective.name={options.get('name', 'dpo')}", *overrides])
