"""The blocks of the attention matrix: every visible pair once, hidden ones not computed, and as many for each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group

from nxdt_core.engine.context.blocks import (
    DocumentCache,
    DocumentChunks,
    _relations,
    local_blocks,
    prefix_blocks,
    ring_blocks,
    zigzag_shard,
    zigzag_unshard,
)

CHUNK = 3
PACKED = (
    (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, -1),
    (0,) * 18,
)
APART = ((0,) * 6 + (1,) * 6 + (7,) * 3 + (-1,) * 3, (5,) * 3 + (6,) * 3 + (7,) * 6 + (8,) * 6)


def chunks(rows: tuple[tuple[int, ...], ...] | None, ranks: int) -> DocumentChunks | None:
    if rows is None:
        return None
    ids = torch.tensor(rows)[:, : 2 * ranks * CHUNK]
    return DocumentChunks(ids, _relations(ids, 2 * ranks))


def counted(documents: DocumentChunks | None, ranks: int, method: str, window: int | None = None) -> torch.Tensor:
    """How often each [row of the batch, query, key] of the whole sequence is attended to."""
    seq = 2 * ranks * CHUNK
    places = torch.arange(seq)
    times = torch.zeros(2, seq, seq, dtype=torch.int64)
    for rank in range(ranks):
        queries = zigzag_shard(places, rank, ranks, 0)
        layout = (ranks, CHUNK, documents, window)
        parts = [(ring_blocks(rank, s, *layout), zigzag_shard(places, s, ranks, 0)) for s in range(ranks)]
        if method == "gather":
            parts = [
                (local_blocks(rank, *layout), queries),
                (prefix_blocks(rank, *layout), places),
            ]
        for blocks, keys in parts:
            for block in blocks:
                of_rows, of_keys = queries[block.rows], keys[block.keys]
                seen = torch.ones(2, len(of_rows), len(of_keys), dtype=torch.bool)
                if block.diagonal:
                    seen &= torch.ones(len(of_rows), len(of_keys)).tril().bool()
                if block.documents is not None:
                    seen &= block.documents[0][:, :, None] == block.documents[1][:, None, :]
                if block.window is not None:
                    oldest = torch.tensor([block.window.first_key(row) for row in range(len(of_rows))])
                    seen &= torch.arange(len(of_keys)) >= oldest[:, None]
                assert seen.any(), "a block of which nothing is seen"
                times[:, of_rows[:, None], of_keys] += seen
    return times


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("rows", [None, PACKED, APART], ids=["whole rows", "packed", "apart"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_visible_pair_is_attended_to_once(ranks, window, rows, method):
    documents = chunks(rows, ranks)
    seq = 2 * ranks * CHUNK
    visible = torch.ones(2, seq, seq).tril().bool()
    if documents is not None:
        visible &= documents.ids[:, :, None] == documents.ids[:, None, :]
    if window is not None:
        visible &= torch.ones(seq, seq).triu(1 - window).bool()
    assert torch.equal(counted(documents, ranks, method, window), visible.long())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_rank_computes_as_many_scores_and_no_more_than_causality_leaves(ranks):
    def scores(block):
        rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        return rows * (rows + 1) // 2 if block.diagonal else rows * keys

    seq = 2 * ranks * CHUNK
    share = seq * (seq + 1) // 2 // ranks
    for rank in range(ranks):
        ring = [block for source in range(ranks) for block in ring_blocks(rank, source, ranks, CHUNK, None)]
        gathered = [*local_blocks(rank, ranks, CHUNK, None), *prefix_blocks(rank, ranks, CHUNK, None)]
        assert sum(map(scores, ring)) == sum(map(scores, gathered)) == share
        assert len(ring) == ranks  # one kernel a hop


def test_chunks_without_a_common_document_are_not_computed_and_those_of_one_need_no_mask():
    documents = chunks(APART, ranks=3)
    assert documents.relations[0] == ("one", "mixed", "apart", "apart", "apart", "apart")
    assert documents.relations[2][3] == "one"
    assert documents.relations[4][5] == "mixed"  # the rows differ: one is padded
    pairs = {
        (rank, source): len(ring_blocks(rank, source, 3, CHUNK, documents)) for rank in range(3) for source in range(3)
    }
    assert pairs[2, 2] == 3
    assert all(block.documents is None for block in ring_blocks(2, 2, 3, CHUNK, documents))
    assert pairs[2, 0] == pairs[0, 2] == 0


def test_blocks_before_the_window_are_not_computed_and_those_within_need_no_mask():
    blocks = {
        (rank, source): ring_blocks(rank, source, 3, CHUNK, None, window=4) for rank in range(3) for source in range(3)
    }
    assert [len(blocks[0, source]) for source in range(3)] == [2, 1, 0]  # late chunk 5 reaches back to 4, on rank 1
    assert all(block.window is None for block in blocks[0, 0])
    assert [len(prefix_blocks(rank, 3, CHUNK, None, window=1)) for rank in range(3)] == [0, 0, 0]


def test_the_blocks_of_a_row_begin_with_the_diagonal():
    for rank in range(3):
        first = ring_blocks(rank, rank, 3, CHUNK, chunks(PACKED, 3))[:2]
        assert [(block.rows, block.diagonal) for block in first] == [(slice(0, 3), True), (slice(3, 6), True)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_shards_in_order_are_the_whole(ranks):
    whole = torch.arange(2 * 2 * ranks * 3).view(2, -1)
    assert torch.equal(zigzag_unshard([zigzag_shard(whole, rank, ranks, 1) for rank in range(ranks)], 1), whole)


def gatherings() -> list[bool]:
    with process_group():
        documents = DocumentCache(dist.group.WORLD)
        ids = zigzag_shard(torch.tensor(PACKED)[:, :12], dist.get_rank(), 2, 1)
        first = documents(ids)
        again = documents(ids)
        ids[0, 0] = 9
        changed = documents(ids)
        with torch.inference_mode():
            in_inference = documents(ids.clone())
        return [
            again is first,
            first.ids.tolist() == [list(row[:12]) for row in PACKED],
            changed.ids[0].tolist() == [9, *PACKED[0][1:3], 9, *PACKED[0][4:12]],
            torch.equal(in_inference.ids, changed.ids),
        ]


def test_ids_are_gathered_once_for_a_batch_and_anew_when_they_change(ranks):
    assert ranks(2).run(gatherings) == [[True] * 4] * 2
