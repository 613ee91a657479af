"""Answers without pairs become rows: whose answer the second row has, which labels are read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from nxdt_plugin_preference.config import DpoConfig, KtoConfig, PreferenceConfig, UnpairedConfig
from nxdt_plugin_preference.loader import PreferenceData, UnpairedData
from nxdt_plugin_preference.objectives import Dpo, Kto

from nxdt_core.data.loader import collate
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.dataset import DataContext

GOOD = {"prompt": "a", "completion": "b", "label": True}
BAD = {"prompt": "c", "completion": "de", "label": False}


def answers(file, seq_length=16, split="train", **settings):
    context = DataContext(seq_length=seq_length, seed=0, tokenizer=ByteTokenizer())
    config = UnpairedConfig(train_files=(file,), validation_files=(file,), **settings)
    return UnpairedData(config, context).split(split)


def rows(sample):
    """Prompt and answer of each row, and the score of the first."""
    texts = ["".join(chr(id_) for id_ in row if id_ < 256) for row in sample.input_ids]
    return (*texts, float(sample.values["answer_scores"][0, 0]))


def test_the_second_row_has_the_answer_of_the_record_before(write):
    records = [GOOD, BAD, {"prompt": "f", "completion": "g", "label": True}]
    dataset = answers(write(records))
    assert [rows(dataset[index]) for index in range(3)] == [("ab", "ag", 1.0), ("cde", "cb", -1.0), ("fg", "fde", 1.0)]
    report = dataset.report()
    assert (report.records, report.tokens.tokens, report.tokens.trained) == (3, 10, 7)  # with their ends


def test_a_pair_is_two_answers_and_the_second_row_is_of_another_prompt(write):
    records = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f"}]
    dataset = answers(write(records))
    wanted = [("ab", "ae", 1.0), ("ac", "af", -1.0), ("de", "db", 1.0), ("df", "dc", -1.0)]
    assert [rows(dataset[index]) for index in range(4)] == wanted


@pytest.mark.parametrize(("label", "score"), [(1, 1), (0, -1), ("True", 1), ("false", -1), (0.0, -1)])
def test_labels_of_tables_are_read(write, label, score):
    dataset = answers(write([GOOD, BAD, {**GOOD, "label": label}]))
    assert rows(dataset[2])[-1] == score


def test_a_column_may_have_another_name(write):
    records = [{"prompt": "a", "output": "b", "kto_tag": label} for label in (True, False)]
    dataset = answers(write(records), columns={"label": "kto_tag", "completion": "output"})
    assert [rows(dataset[index])[-1] for index in range(2)] == [1, -1]


def test_the_second_row_is_cut_where_the_other_answer_does_not_fit(write):
    dataset = answers(write([GOOD, {**BAD, "completion": "x" * 14}]), seq_length=16, packing=True)
    assert len(dataset) == 2
    for sample in (dataset[index] for index in range(2)):
        assert (sample.document_ids >= 0).sum(axis=1).max() <= 16
        assert ((sample.loss_weights > 0) & (sample.labels >= 0)).any(axis=1).all()


@pytest.mark.parametrize(
    ("record", "code", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "NXDT-A009", "'label'.*is missing"),
        ({**GOOD, "label": "yes"}, "NXDT-A009", "is 'yes'"),
        ({**GOOD, "label": None}, "NXDT-A009", "is missing"),
        ({"prompt": "a", "label": True}, "NXDT-A001", "no 'completion' answer"),
        ({**GOOD, "completion": " "}, "NXDT-A002", "'completion' answer"),
        ({"completion": "b", "label": True}, "NXDT-A004", "no prompt"),
    ],
)
def test_a_record_that_is_no_answer_with_a_label_is_refused_with_its_line(write, record, code, said):
    file = write([GOOD, BAD, record])
    with pytest.raises(NxdtError, match=said) as raised:
        answers(file)
    assert raised.value.code == code
    assert f"{file}:3" in raised.value.what()
    dropped = answers(file, bad_records="drop", max_bad_share=0.5)
    assert len(dropped) == 2
    assert "pairs.jsonl:3" in dropped.report().bad[0]


def test_training_data_of_one_label_alone_are_refused(write):
    file = write([GOOD, GOOD])
    with pytest.raises(NxdtError, match=r"A014.*all 2 records of train data is true"):
        answers(file)
    assert len(answers(file, split="validation")) == 2


def test_objectives_refuse_the_data_of_each_other(write):
    unpaired = answers(write([GOOD, BAD]))
    with pytest.raises(NxdtError, match="A021"):
        Dpo(DpoConfig()).weight(collate([unpaired[0], unpaired[1]]))
    file = write([{"prompt": "a", "chosen": "b", "rejected": "c"}], "chosen.jsonl")
    context = DataContext(seq_length=16, seed=0, tokenizer=ByteTokenizer())
    pair = PreferenceData(PreferenceConfig(train_files=(file,)), context).split("train")[0]
    for batch in (collate([pair]), collate([unpaired[0]])):  # the second was not prepared
        with pytest.raises(NxdtError, match="A022"):
            Kto(KtoConfig()).weight(batch)


def test_margins_are_read_where_they_are_asked_for(write):
    records = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
        {"prompt": "a", "chosen": "b", "rejected": "d"},
    ]
    context = DataContext(seq_length=8, seed=0, tokenizer=ByteTokenizer())

    def pairs(records, **more):
        config = PreferenceConfig(train_files=(write(records),), **more)
        return PreferenceData(config, context).split("train")

    dataset, without = pairs(records, margins=True), pairs(records)
    assert [float(dataset[index].values["answer_scores"].max()) for index in range(2)] == [0.5, 0]
    assert np.array_equal(dataset[0].values["answer_scores"], [[0.5] * 3 + [0] * 5] * 2)
    assert dataset.report().unused == {}
    assert without.report().unused == {"margin": 1}
    assert not without[0].values
    assert without.fingerprint() != dataset.fingerprint()
    for margin in ("much", 1e300, 10**400):
        with pytest.raises(NxdtError, match=r"A005.*'margin' of .*:1 cannot be read: .* is not a number") as caught:
            pairs([{**records[0], "margin": margin}], margins=True)
        assert repr(margin) in str(caught.value)
