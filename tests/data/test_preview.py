"""What a preview shows of samples: text in order, trained apart from untrained, counts."""

from __future__ import annotations

import numpy as np

from nxdt_core.data.preview import preview
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport, MapDataset, TokenCount

NO = IGNORE_INDEX
BYTES = ByteTokenizer()


class Samples(MapDataset):
    """A map-style dataset of given samples."""

    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def fingerprint(self):
        return "x"


class Reporting(Samples):
    def report(self):
        return DataReport(records=9, tokens=TokenCount(tokens=8, trained=7), lengths=np.array([8]))


def sample(inputs, labels, **more):
    return Sample(input_ids=np.array([*inputs]), labels=np.array(labels), **{k: np.array(v) for k, v in more.items()})


def shown(dataset, count=1, tokenizer=BYTES):
    return preview(dataset, tokenizer, count=count, seed=1, shuffle=False)


def parts(document):
    return [(part.text, part.trained) for part in document.parts]


def test_a_token_is_trained_where_the_one_before_it_has_it_as_label():
    (one,) = shown(Samples(sample(b"abcd", [NO, *b"cd", NO]))).shown
    (document,) = one.documents
    assert parts(document) == [("ab", False), ("cd", True)]
    assert document.count == TokenCount(tokens=4, trained=2)


def test_a_label_behind_the_last_input_is_shown():
    (one,) = shown(Samples(sample(b"abc", [NO, NO, *b"d"]))).shown
    assert parts(one.documents[0]) == [("abc", False), ("d", True)]


def test_documents_are_apart_and_padding_is_no_text():
    packed = sample(b"abxyPP", [*b"b!", *b"y?", NO, NO], document_ids=[0, 0, 1, 1, -1, -1])
    (one,) = shown(Samples(packed)).shown
    assert [parts(document) for document in one.documents] == [
        [("a", False), ("b!", True)],
        [("x", False), ("y?", True)],
    ]
    assert (one.padding, one.length) == (2, 6)


def test_padding_of_a_row_that_is_one_document_is_no_text():
    (one, other) = shown(Samples(sample(b"abPPP", [NO, *b"!", NO, NO, NO]), sample(b"abbb", [*b"bbbb"])), count=2).shown
    assert parts(one.documents[0]) == [("ab", False), ("!", True)]
    assert (one.padding, other.padding) == (3, 0)


def test_labels_that_are_not_shifted_show_as_nonsense():
    (one,) = shown(Samples(sample(b"abcd", [*b"abcd"]))).shown
    assert parts(one.documents[0]) == [("a", False), ("abcd", True)]


def test_a_weight_of_zero_is_not_trained():
    (one,) = shown(Samples(sample(b"abc", [*b"bc", NO], loss_weights=[0.0, 1.0, 0.0]))).shown
    assert parts(one.documents[0]) == [("ab", False), ("c", True)]


def test_rows_of_a_sample_are_shown_each():
    pair = sample([[*b"ab"], [*b"ac"]], [[*b"b", NO], [*b"c", NO]])
    assert [parts(one.documents[0])[-1] for one in shown(Samples(pair)).shown] == [("b", True), ("c", True)]


def test_without_a_tokenizer_there_are_ids_alone():
    (one,) = shown(Samples(sample([7, 8], [8, NO])), tokenizer=None).shown
    assert [(part.text, part.ids) for part in one.documents[0].parts] == [("", (7,)), ("", (8,))]


def test_samples_come_in_the_order_of_the_run():
    dataset = Samples(*(sample([i], [NO]) for i in range(50)))
    order = [one.index for one in preview(dataset, None, count=50, seed=3, shuffle=True).shown]
    assert sorted(order) == list(range(50))
    assert order != sorted(order)
    assert [one.index for one in shown(dataset, count=2).shown] == [0, 1]


class Large(Samples):
    def __len__(self):
        return 10**15

    def __getitem__(self, index):
        return sample([index % 7], [NO])


def test_the_first_samples_of_a_large_dataset_cost_no_order_of_all():
    found = preview(Large(), None, count=3, seed=1, shuffle=True)
    assert (len(found.shown), found.samples) == (3, 10**15)


def test_counts_are_the_datasets_own_where_it_reports():
    found = shown(Reporting(sample(b"ab", [*b"b", NO])))
    assert (found.counted, found.report.records) == (None, 9)
    counted = shown(Samples(*[sample(b"abPP", [*b"b", NO, NO, NO], document_ids=[0, 0, -1, -1])] * 3))
    assert counted.counted == 3
    assert counted.report.tokens == TokenCount(tokens=6, trained=3)
    assert counted.report.lengths.tolist() == [2, 2, 2]
    assert counted.report.efficiency == 0.5
