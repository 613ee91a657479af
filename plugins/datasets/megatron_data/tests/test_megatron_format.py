"""Files of others are read, ours are theirs byte for byte, and what is broken is refused in words."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import torch
from nxdt_plugin_megatron_data.errors import BadIndexFile, DataShorterThanIndex, IndexedFileMissing
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens, bin_path, dtype_for, idx_path, write_documents
from nxdt_testing.errors import raises

from nxdt_core.errors.data import DataFileChanged, DataFileUnreadable

CODES = {"<u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write(prefix, sequences, dtype="<u2"):
    write_documents(prefix, np.dtype(dtype), ([np.array(tokens, np.int64)] for tokens in sequences))
    return prefix


def content(prefix):
    return idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()


@pytest.mark.parametrize(("dtype", "code"), CODES.items())
def test_files_written_by_hand_are_read(by_hand, sequences, dtype, code):
    read = IndexedTokens(by_hand("hand", sequences, code=code))
    assert [read[i].tolist() for i in range(len(read))] == sequences
    assert (read.dtype, read.documents, read.total_tokens()) == (np.dtype(dtype), 61, sum(map(len, sequences)))


@pytest.mark.parametrize(("dtype", "code"), CODES.items())
def test_ours_are_those_written_by_hand_to_the_byte(by_hand, sequences, tmp_path, dtype, code):
    assert content(write(tmp_path / "ours", sequences, dtype)) == content(by_hand("hand", sequences, code=code))


def test_a_document_of_several_sequences_and_one_of_none_keep_their_borders(by_hand, tmp_path):
    documents = [[np.array([1, 2]), np.array([3])], [], [np.array([4, 5, 6])]]
    write_documents(tmp_path / "ours", np.dtype("<u2"), documents)
    assert content(tmp_path / "ours") == content(by_hand("hand", [[1, 2], [3], [4, 5, 6]], borders=[0, 2, 2, 3]))
    assert IndexedTokens(tmp_path / "ours").borders.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("dtype", CODES)
def test_megatron_core_writes_the_same_bytes_and_reads_ours(megatron, sequences, tmp_path, dtype):
    kind = getattr(np, np.dtype(dtype).name)
    theirs = megatron.indexed_dataset.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=kind)
    for tokens in sequences:
        theirs.add_document(np.array(tokens, np.int64), [len(tokens)])
    theirs.finalize(str(idx_path(tmp_path / "theirs")))
    ours = write(tmp_path / "ours", sequences, dtype)
    assert content(ours) == content(tmp_path / "theirs")
    read = megatron.indexed_dataset.IndexedDataset(str(ours))
    assert [read[i].tolist() for i in range(len(read))] == sequences


@pytest.mark.parametrize("vocab_size", [259, 65499, 65500, 65536, 128256])
def test_tokens_take_the_type_that_megatron_core_takes(megatron, vocab_size):
    assert dtype_for(vocab_size) == np.dtype(megatron.indexed_dataset.DType.optimal_dtype(vocab_size))


def test_multimodal_files_are_read_with_their_modes(megatron, tmp_path):
    builder = megatron.indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=0)
    builder.add_item(torch.tensor([3]), mode=5)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    read = IndexedTokens(tmp_path / "m")
    assert read.modes.tolist() == [0, 5]
    assert read[1].tolist() == [3]


def test_empty_files_are_read(by_hand, tmp_path):
    assert len(IndexedTokens(by_hand("none", []))) == 0
    assert IndexedTokens(write(tmp_path / "ours", [])).total_tokens() == 0


def test_a_prefix_may_hold_dots(tmp_path):
    write(tmp_path / "v1.5_text_document", [[1, 2]])
    assert sorted(os.listdir(tmp_path)) == ["v1.5_text_document.bin", "v1.5_text_document.idx"]
    assert IndexedTokens(tmp_path / "v1.5_text_document")[0].tolist() == [1, 2]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OverflowError, match="70000 does not fit"):
        write(tmp_path / "x", [[1], [70000]])
    assert os.listdir(tmp_path) == []


def test_a_missing_file_is_told_with_its_neighbours(by_hand, tmp_path):
    by_hand("corpus_text", [[1]])
    with raises(IndexedFileMissing, match=r"no .*corpus_txt\.idx; found nearby: .*corpus_text'"):
        IndexedTokens(tmp_path / "corpus_txt")
    bin_path(tmp_path / "corpus_text").unlink()
    with raises(IndexedFileMissing, match=r"corpus_text\.bin"):
        IndexedTokens(tmp_path / "corpus_text")


@pytest.mark.parametrize("path_of", [idx_path, bin_path])
def test_a_git_lfs_pointer_is_named_with_what_fetches_the_file(by_hand, path_of):
    prefix = by_hand("cloned", [[1, 2], [3]])
    path_of(prefix).write_text("version https://git-lfs.github.com/spec/v1")
    with raises(DataFileUnreadable, match="git lfs pull"):
        IndexedTokens(prefix)


def test_every_cut_of_an_index_is_refused(by_hand):
    prefix = by_hand("cut", [[1, 2], [3]])
    whole = idx_path(prefix).read_bytes()
    for size in range(len(whole)):
        idx_path(prefix).write_bytes(whole[:size])
        with raises(BadIndexFile, match=r"cut\.idx is not a complete Megatron index"):
            IndexedTokens(prefix)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, b"XXXX", "does not begin with"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "type 6"),
        (17, b"\x63", "type 99"),
        (18, struct.pack("<Q", 2**62), "needs? "),
        (34, struct.pack("<i", -1), "negative length"),
        (42, struct.pack("<q", 1), "within a token"),
        (58, struct.pack("<q", 1), "end at sequence"),
        (66, struct.pack("<q", 9), "do not ascend"),
    ],
)
def test_what_contradicts_itself_is_refused(by_hand, place, value, said):
    prefix = by_hand("bad", [[1, 2], [3]])
    whole = bytearray(idx_path(prefix).read_bytes())
    whole[place : place + len(value)] = value
    idx_path(prefix).write_bytes(whole)
    with raises(BadIndexFile, match=said):
        IndexedTokens(prefix)


def test_data_shorter_than_its_index_is_refused_with_both_numbers(by_hand):
    prefix = by_hand("short", [[1, 2], [3]])
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-1])
    with raises(DataShorterThanIndex, match=r"short\.bin has 5 bytes, and its index needs 6"):
        IndexedTokens(prefix)


def test_a_place_that_no_file_reaches_is_refused(by_hand):
    prefix = by_hand("far", [[1, 2], [3]])
    whole = bytearray(idx_path(prefix).read_bytes())
    whole[42:50] = struct.pack("<q", 2**63 - 2)
    idx_path(prefix).write_bytes(whole)
    with raises(DataShorterThanIndex, match=f"its index needs {2**63 + 2}"):
        IndexedTokens(prefix)


def test_counts_whose_sum_would_wrap_are_refused(by_hand):
    """2**62 + 2**63 + 2**62 bytes of arrays are none in the arithmetic of 64 bits."""
    prefix = by_hand("wrapped", [[1, 2], [3]])
    whole = bytearray(idx_path(prefix).read_bytes())
    whole[18:34] = struct.pack("<QQ", 2**60, 2**59 + (len(whole) - 34) // 8)
    idx_path(prefix).write_bytes(whole)
    with raises(BadIndexFile, match=r"sequences and .* document borders need"):
        IndexedTokens(prefix)


def test_sequences_that_share_tokens_are_refused(by_hand):
    """Thousands that each have all of a large file would make indices that no memory holds."""
    prefix = by_hand("shared", [[1, 2], [3, 4]])
    whole = bytearray(idx_path(prefix).read_bytes())
    whole[50:58] = struct.pack("<q", 0)
    whole[34:42] = struct.pack("<ii", 4, 4)
    idx_path(prefix).write_bytes(whole)
    with raises(BadIndexFile, match=r"have 8 tokens, and .*shared\.bin has 4"):
        IndexedTokens(prefix)


def test_tokens_that_a_file_has_lost_since_are_told(by_hand):
    prefix = by_hand("lost", [[1, 2], [3, 4]])
    source = IndexedTokens(prefix)
    os.truncate(bin_path(prefix), 4)
    assert source[0].tolist() == [1, 2]
    with raises(DataFileChanged, match=r"lost\.bin has changed .* had 8 bytes, and now has 4"):
        source[1]
    os.truncate(idx_path(prefix), 40)
    with raises(DataFileChanged, match=r"lost\.idx has changed"):
        source.check()
