"""The attention core against its definition, documents kept apart, and the block around it."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nxdt_core.distributed.devices import PROFILES, current_device, profile_of
from nxdt_core.models.attention.documents import DocumentMasks, document_mask, window_mask
from nxdt_core.models.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.models.attention.sinks import SinkAttention
from nxdt_core.models.random.dropout import causal_attention
from nxdt_core.models.rotary import RotaryEmbedding

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1]])


def definition(query, key, value, document_ids=None, window=None, sinks=None):
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    seq = query.shape[2]
    for i in range(seq):
        for j in range(seq):
            for b in range(query.shape[0]):
                apart = document_ids is not None and document_ids[b, i] != document_ids[b, j]
                if j > i or apart or (window is not None and i - j >= window):
                    scores[b, :, i, j] = -torch.inf
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def heads(kv_heads: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, n, 8, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (4, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("document_ids", [None, IDS], ids=["whole rows", "documents"])
def test_the_core_computes_attention(kv_heads, document_ids):
    inputs = heads(kv_heads)
    ours, expected = CausalAttention()(*inputs, document_ids), definition(*inputs, document_ids)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("window", [1, 3, 7, 8, 100])
@pytest.mark.parametrize("document_ids", [None, IDS], ids=["whole rows", "documents"])
def test_a_windowed_core_sees_the_last_few_tokens(window, document_ids, monkeypatch):
    monkeypatch.setattr("nxdt_core.models.attention.grouped_query._LEAST_ROWS", 3)
    inputs = heads(2)
    ours = CausalAttention(window=window)(*inputs, document_ids)
    expected = definition(*inputs, document_ids, window=window)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), rtol=1e-6, atol=1e-9
    )
    assert CausalAttention(window=window).semantics().window == window


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("document_ids", [None, IDS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("kernel", ["masked_flash", "composed"])
def test_sinks_take_part_in_the_softmax_and_have_no_value(window, document_ids, kernel, monkeypatch):
    monkeypatch.setitem(PROFILES, "cpu", replace(PROFILES["cpu"], attention_kernel=kernel))
    inputs = [*heads(2), torch.tensor([-1.0, 0.5, 3.0, 1e3], dtype=torch.float64).requires_grad_()]
    *qkv, sinks = inputs
    ours = SinkAttention(window=window)(*qkv, document_ids, sinks=sinks)
    expected = definition(*qkv, document_ids, window, sinks)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), rtol=1e-6, atol=1e-9
    )


def test_sinks_are_computed_with_in_the_dtype_of_autocast():
    query, key, value = (tensor.detach().float() for tensor in heads(2))
    sinks = torch.tensor([-1.0, 0.5, 3.0, 0.0])
    with torch.autocast("cpu", torch.bfloat16):
        found = SinkAttention()(query, key, value.bfloat16(), IDS, sinks=sinks)  # queries are rotated in float32
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), definition(query, key, value, IDS, None, sinks), atol=3e-2, rtol=3e-2)


def test_a_windowed_core_computes_few_scores(monkeypatch):
    scores = []
    attend = nn.functional.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        scores.append(query.shape[2] * key.shape[2])
        return attend(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    core = CausalAttention(window=512)
    core(*(torch.randn(1, 1, 4096, 8) for _ in range(3)))
    assert sum(scores) <= 1.25 * 4096 * 512
    scores.clear()
    core(*(torch.randn(1, 1, 512, 8) for _ in range(3)))
    assert len(scores) == 1  # all are within the window: the plain call, whose kernel skips what lies behind


def test_windowed_cores_of_a_model_build_one_mask(monkeypatch):
    masks, made = DocumentMasks(), []
    monkeypatch.setattr(
        "nxdt_core.models.attention.documents.window_mask", lambda *key: made.append(key) or window_mask(*key)
    )
    inputs, ids = heads(2), IDS.clone()
    with torch.inference_mode():
        CausalAttention(masks, window=2)(*inputs)
    assert len(made) == 1  # which no backward may use: not kept
    for _ in range(3):
        CausalAttention(masks, window=2)(*inputs).sum().backward()
        CausalAttention(masks, window=2)(*inputs, ids)
        CausalAttention(masks)(*inputs, ids)
    assert len(made) == 3
    ids[0] = 0
    changed = CausalAttention(masks, window=2)(*inputs, ids)
    torch.testing.assert_close(changed, definition(*inputs, ids, window=2))


@pytest.mark.parametrize(
    ("dtype", "p", "window", "ids", "shared"),
    [
        (torch.float32, 0, None, None, False),
        (torch.float32, 0.1, None, None, False),
        (torch.bfloat16, 0, None, None, True),
        (torch.bfloat16, 0.1, None, None, True),
        (torch.bfloat16, 0, 3, None, False),
        (torch.bfloat16, 0, None, IDS, False),
        (torch.bfloat16, 0.1, None, IDS, False),
    ],
    ids=["float32", "float32-dropout", "half", "half-dropout", "window", "documents", "documents-dropout"],
)
def test_fused_kernels_are_given_heads_as_they_take_them(dtype, p, window, ids, shared):
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is functional.scaled_dot_product_attention:
                given.append((args[0].shape[1] != args[1].shape[1], kwargs["enable_gqa"]))
            return func(*args, **(kwargs or {}))

    given: list[tuple[bool, bool]] = []
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in heads(2)]
    core, as_written = causal_attention(p), CausalAttention(window=window)
    core.window = window
    core.shared_heads = frozenset(getattr(torch, name) for name in PROFILES["cuda"].shared_heads or ())
    with Calls():
        found = core(*inputs, ids)
    assert set(given) == {(shared, shared)}
    if not p:
        expected = as_written(*inputs, ids)
        grads = [torch.autograd.grad(each.sum(), inputs) for each in (found, expected)]
        within = {"rtol": 5e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close((found, *grads[0]), (expected, *grads[1]), **within)


@pytest.mark.accelerator
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_accelerator_keeps_no_scores(dtype, window):
    seq, device, core = 4096, current_device(), CausalAttention(window=window)
    shared = profile_of(device).shared_heads
    core.shared_heads = None if shared is None else frozenset(getattr(torch, name) for name in shared)
    inputs = [torch.randn(1, n, seq, 64, device=device, dtype=dtype).requires_grad_() for n in (16, 4, 4)]
    profile_of(device).operations.reset_max_memory(device)
    before = profile_of(device).operations.max_memory_bytes(device)
    core(*inputs).sum().backward()
    scores = 16 * seq * (seq if window is None else 640) * dtype.itemsize  # kept in addition to what is needed anyhow
    assert profile_of(device).operations.max_memory_bytes(device) - before < scores


def test_padding_gives_finite_outputs_and_gradients():
    inputs = heads(2)
    output = CausalAttention()(*inputs, torch.full((2, 8), -1))
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(t.grad).all() for t in inputs)


def test_one_document_is_no_different_from_none():
    inputs = heads(2)
    torch.testing.assert_close(CausalAttention()(*inputs, torch.zeros(2, 8).long()), CausalAttention()(*inputs))


def test_cores_of_a_model_build_one_mask_for_a_batch():
    masks = DocumentMasks()
    assert masks(IDS, torch.float32) is masks(IDS, torch.float32)
    torch.testing.assert_close(masks(IDS, torch.float32), document_mask(IDS, torch.float32))


def test_a_mask_is_built_anew_for_other_ids_dtypes_and_changes_in_place():
    masks, ids = DocumentMasks(), IDS.clone()
    before = masks(ids, torch.float32)
    assert torch.equal(masks(ids.clone(), torch.float32), before)
    assert masks(ids, torch.float64).dtype == torch.float64
    ids[0, :] = 0
    assert torch.equal(masks(ids, torch.float64), document_mask(ids, torch.float64))


def test_a_mask_dies_with_its_batch():
    masks, ids = DocumentMasks(), IDS.clone()
    masks(ids, torch.float32)
    assert len(masks._masks) == 1
    del ids
    gc.collect()
    assert len(masks._masks) == 0


def test_masks_work_in_inference_mode_and_after_a_deep_copy():
    masks = DocumentMasks()
    masks(IDS, torch.float32)
    with torch.inference_mode():
        ids = IDS.clone()
        assert torch.equal(copy.deepcopy(masks)(ids, torch.float32), document_mask(IDS, torch.float32))


def block(core: nn.Module | None = None) -> GroupedQueryAttention:
    torch.manual_seed(0)
    return GroupedQueryAttention(32, heads=4, kv_heads=2, head_dim=6, core=core or CausalAttention())


def test_later_tokens_and_other_documents_do_not_reach_a_token():
    attention, rotary = block(), RotaryEmbedding(6)(torch.arange(8))
    hidden = torch.randn(1, 8, 32)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    reach = torch.autograd.functional.jacobian(lambda x: attention(x, rotary, ids).sum(-1).squeeze(0), hidden)
    reached = reach.abs().sum((1, 3)).gt(0)  # [to, from]
    assert torch.equal(reached, torch.block_diag(torch.ones(4, 4).tril(), torch.ones(4, 4).tril()).bool())


def test_the_core_is_a_slot():
    seen = []

    class Recorder(nn.Module):
        def forward(self, query, key, value, document_ids, step):
            seen.append((query.shape, key.shape, value.shape, document_ids))
            return query

    attention = block()
    attention.core = Recorder()
    attention(torch.randn(2, 8, 32), RotaryEmbedding(6)(torch.arange(8)), IDS)
    assert seen == [((2, 4, 8, 6), (2, 2, 8, 6), (2, 2, 8, 6), IDS)] or seen[0][3] is IDS
    assert seen[0][:3] == ((2, 4, 8, 6), (2, 2, 8, 6), (2, 2, 8, 6))


def test_halves_of_the_heads_add_up_to_the_whole():
    # What tensor parallelism does: each shard holds whole heads, and outputs are summed.
    attention, rotary = block(), RotaryEmbedding(6)(torch.arange(8))
    hidden = torch.randn(2, 8, 32)
    total = torch.zeros_like(hidden)
    for rank in range(2):
        shard = copy.deepcopy(attention)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(shard, name)
            linear.weight = nn.Parameter(linear.weight.chunk(2, 0)[rank])
        shard.o_proj.weight = nn.Parameter(shard.o_proj.weight.chunk(2, 1)[rank])
        total += shard(hidden, rotary)
    torch.testing.assert_close(total, attention(hidden, rotary))
