"""Attention by blocks: the lists of blocks against the mask, and FlexAttention's results and gradients on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch.nn.attention import flex_attention

from nxdt_core.distributed.devices import PROFILES, current_device, profile_of
from nxdt_core.engine.layout import block_attention
from nxdt_core.models.attention.documents import BLOCK_ROWS, BlockAttention, document_blocks
from nxdt_core.models.attention.grouped_query import CausalAttention
from tests.integer_widths import IntegerWidths

SEQ = 5 * BLOCK_ROWS - 40
"""The last block is not full."""


def documents(*lengths: int) -> torch.Tensor:
    """The ids of documents of these lengths; what is left is padding."""
    ids = torch.full((SEQ,), -1)
    begin = 0
    for number, length in enumerate(lengths):
        ids[begin : begin + length] = number
        begin += length
    return ids


IDS = torch.stack((documents(300, 150, 20, 60), documents(BLOCK_ROWS, 2 * BLOCK_ROWS, 100), documents(SEQ)))


def visible(ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """By definition: bool [batch, seq, seq]."""
    rows, keys = torch.arange(SEQ)[:, None], torch.arange(SEQ)
    seen = (ids[:, :, None] == ids[:, None, :]) & (keys <= rows)
    return seen if window is None else seen & (rows - keys < window)


def by_block(seen: torch.Tensor, fill: bool) -> torch.Tensor:
    """[batch, blocks, rows, blocks, keys]"""
    missing = -SEQ % BLOCK_ROWS
    return (
        torch.nn.functional.pad(seen, (0, missing, 0, missing), value=fill)
        .unflatten(1, (-1, BLOCK_ROWS))
        .unflatten(3, (-1, BLOCK_ROWS))
    )


def listed(numbers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool [batch, blocks, blocks] of lists."""
    found = torch.zeros(numbers.shape, dtype=torch.bool)
    in_list = torch.arange(numbers.shape[-1]) < counts[..., None]
    return found.scatter(-1, numbers.long(), in_list)[:, 0]


@pytest.mark.parametrize("window", [None, 40, 130, 300])
def test_blocks_are_those_with_a_visible_key_and_no_others(window):
    blocks, seen = document_blocks(IDS, window), visible(IDS, window)
    some, every = by_block(seen, False).any(4).any(2), by_block(seen, True).all(4).all(2)
    partial = listed(blocks.kv_indices, blocks.kv_num_blocks)
    full = listed(blocks.full_kv_indices, blocks.full_kv_num_blocks)
    assert torch.equal(partial | full, some)
    assert not (partial & full).any()
    assert not (full & ~every).any()
    below = torch.ones_like(every[0]).tril(-1)
    assert torch.equal(full, every & below)  # on the diagonal no block is full


def test_documents_in_pieces_lose_no_key():
    ids = torch.randint(3, (1, SEQ), generator=torch.Generator().manual_seed(0))
    blocks, seen = document_blocks(ids), visible(ids, None)
    partial = listed(blocks.kv_indices, blocks.kv_num_blocks)
    full = listed(blocks.full_kv_indices, blocks.full_kv_num_blocks)
    assert not (by_block(seen, False).any(4).any(2) & ~(partial | full)).any()
    assert not full.any()


def test_work_is_that_of_the_documents():
    """Half of the squares of the documents, and not of the row: in blocks."""
    seq, length = 64 * BLOCK_ROWS, 4 * BLOCK_ROWS
    ids = (torch.arange(seq) // length).unsqueeze(0)
    blocks = document_blocks(ids)
    computed = int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())
    assert computed == seq // length * (4 * 5 // 2)
    assert computed < 64 * 65 // 2 / 12


@pytest.fixture
def on_hosts(monkeypatch):
    """torch refuses gradients on hosts, whose compiled kernel has none; without that kernel they are computed."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield BlockAttention(frozenset({torch.float32, torch.float64}), backend="eager")
    torch._dynamo.reset()


@pytest.mark.parametrize(("kv_heads", "window"), [(2, None), (1, 200)])
def test_results_and_gradients_are_those_under_a_mask(kv_heads, window, on_hosts):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(3, heads, SEQ, 16, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (2, kv_heads, kv_heads)
    ]
    masked, by_blocks = CausalAttention(window=window), CausalAttention(window=window)
    by_blocks.blocks = on_hosts
    expected, found = masked(*inputs, IDS), by_blocks(*inputs, IDS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), rtol=1e-9, atol=1e-9
    )


def test_lists_and_masks_have_integers_of_one_width(on_hosts):
    found = IntegerWidths()
    core = CausalAttention(window=200)
    core.blocks = BlockAttention(on_hosts.dtypes, backend=found)
    inputs = [torch.randn(3, 2, SEQ, 16, requires_grad=True) for _ in range(3)]
    with torch._dynamo.config.patch(assume_static_by_default=False):
        core(*inputs, IDS).sum().backward()
        torch.compile(lambda ids: document_blocks(ids, 200).kv_indices, fullgraph=True, backend=found)(IDS)
    assert (found.dynamic, found.found) == (3, [])


def test_what_has_no_kernel_runs_under_a_mask(on_hosts):
    core = CausalAttention()
    core.blocks = on_hosts
    for dtype, width in ((torch.float32, 8), (torch.bfloat16, 16)):
        inputs = [torch.randn(3, 2, SEQ, width, dtype=dtype) for _ in range(3)]
        assert torch.equal(core(*inputs, IDS), CausalAttention()(*inputs, IDS))


def test_short_sequences_do_not_get_the_kernel_of_decoding():
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
    from torch._inductor.virtualized import V

    options = {}

    def keep(graph, _):
        (node,) = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention]
        options.update(node.args[6])
        return graph.forward

    blocks = block_attention(PROFILES["cuda"])
    assert blocks is not None
    blocks.backend = keep
    query, key = torch.empty(1, 4, 64, 128), torch.empty(1, 1, 64, 128)
    with torch.no_grad():
        blocks(query, key, key, document_blocks(torch.zeros(1, 64, dtype=torch.int64)))
    sized = [SimpleNamespace(get_size=lambda shape=t.shape: list(map(sympy.Integer, shape))) for t in (query, key)]
    lists = SimpleNamespace(get_size=lambda: [sympy.Integer(1)] * 4)
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))):
        assert _use_flex_decoding(sized[0], lists, sized[1], {}, True)
        assert not _use_flex_decoding(sized[0], lists, sized[1], options, True)


@pytest.mark.accelerator
@pytest.mark.parametrize("seq", [SEQ, 64])
@pytest.mark.parametrize("window", [None, 200])
def test_an_accelerators_kernels_compute_what_its_mask_does(window, seq):
    profile = profile_of(device := current_device())
    dtypes = frozenset(getattr(torch, name) for name in profile.block_attention)
    if torch.bfloat16 not in dtypes:
        pytest.skip("its profile has no attention by blocks")
    inputs = [torch.randn(3, heads, seq, 128, device=device).bfloat16().requires_grad_() for heads in (8, 2, 2)]
    ids = IDS[:, :seq].to(device)
    by_blocks, masked = CausalAttention(window=window), CausalAttention(window=window)
    by_blocks.blocks = BlockAttention(dtypes, backend=profile.compile_backend)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    found, expected = by_blocks(*inputs, ids), masked(*exact, ids)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, exact, grad.float())
    torch.testing.assert_close([each.float() for each in grads[0]], [*grads[1]], rtol=5e-2, atol=5e-2)
