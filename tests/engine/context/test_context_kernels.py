"""Attention kernels with log-sum-exp against their definition: whole, masked, cut into parts and merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.devices import HOST, current_device, profile_of
from nxdt_core.models.attention.partial_attention import (
    _KERNELS,
    AttentionGradients,
    Block,
    ComposedKernel,
    FlashOrEfficientKernel,
    MaskedFlashKernel,
    MergedAttention,
    Scoring,
    Window,
    contiguous_heads,
    kernel_for,
)
from tests.sampling import slow

ROWS, KEYS, WIDTH, SCALE = 12, 20, 8, 0.3


def tensors(dtype: torch.dtype, kv_heads: int, *, rows: int = ROWS, keys: int = KEYS, value_width: int = WIDTH):
    """Query, key, value and gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (2, rows, 4, WIDTH),
        (2, keys, kv_heads, WIDTH),
        (2, keys, kv_heads, value_width),
        (2, rows, 4, value_width),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]


def definition(query, key, value, visible, softcap=None):
    """Output and log-sum-exp in float64, as the formulas say."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def mask(name: str, rows: int = ROWS, keys: int = KEYS) -> torch.Tensor | None:
    if name == "none":
        return None
    if name == "causal":
        return torch.ones(1, 1, rows, keys).tril().bool()
    seen = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 0] = True  # no row sees nothing
    return seen


def scoring(name: str, visible: torch.Tensor | None, *, fused: bool) -> Scoring:
    causal = name == "causal" and fused
    return Scoring(scale=SCALE, causal=causal, visible=None if causal else visible)


LENGTHS = [(ROWS, KEYS), (13, 21)]
"""Numbers of rows and keys: neither keys divide by the eight halves of a 16-byte vector, the second pair is odd."""


def check(kernel, device, dtype, kv_heads, name, lengths, tolerance):
    """Output, log-sum-exp and gradients of ``kernel``, which is given those of the definition."""
    rows, keys = lengths
    given = tensors(dtype, kv_heads, rows=rows, keys=rows if name == "causal" else keys)
    visible = mask(name, rows, given[1].shape[2])
    *leaves, grad = (t.double().requires_grad_() for t in given)
    output, lse = definition(*leaves, visible)
    expected = torch.autograd.grad(output, leaves, grad.detach())
    how = scoring(name, None if visible is None else visible.to(device), fused=kernel.fused)
    query, key, value, grad = (t.to(device) for t in given)
    assert kernel.takes(query, value)
    found, found_lse = kernel.forward(query, key, value, how)
    assert found.dtype == dtype
    assert found_lse.shape == lse.shape
    assert found_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = kernel.backward(
        grad, query, key, value, output.detach().to(device, dtype), lse.detach().to(device, found_lse.dtype), how
    )
    assert [g.shape for g in gradients] == [t.shape for t in (query, key, value)]
    for ours, theirs in zip((found, found_lse, *gradients), (output, lse, *expected), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["none", "causal", "random"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", [ComposedKernel(), MaskedFlashKernel()], ids=lambda k: type(k).__name__)
def test_kernels_of_the_host_compute_attention(kernel, dtype, kv_heads, name, lengths):
    check(kernel, HOST, dtype, kv_heads, name, lengths, {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 5e-2))


@pytest.mark.accelerator
@pytest.mark.parametrize("name", ["none", "causal", "random"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_kernels_of_an_accelerator_compute_attention(dtype, kv_heads, name, lengths):
    device = current_device()
    kernel = _KERNELS[profile_of(device).attention_kernel]
    check(kernel, device, dtype, kv_heads, name, lengths, 1e-4 if dtype == torch.float32 else 5e-2)


class AsCudaReads(TorchDispatchMode):
    """Checks what torch's CUDA kernels take for granted and its operators do not check on other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func._opname.startswith("_scaled_dot_product"):
            self.called.append(func._opname.removeprefix("_scaled_dot_product_"))
            given = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]
            for tensor in given:  # in vectors of 16 bytes
                assert tensor.stride(-1) == 1
                assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
            if "efficient" in func._opname:
                self._efficient(args, backward=func._opname.endswith("backward"))
        return func(*args, **(kwargs or {}))

    def _efficient(self, args: Any, *, backward: bool) -> None:
        query, key, value, bias = args[backward : backward + 4]
        assert query.shape[1] == key.shape[1] == value.shape[1]
        if bias is not None:
            assert (bias.dtype, bias.shape) == (query.dtype, (*query.shape[:3], key.shape[2]))
        if backward:
            output, lse = args[5:7]
            assert lse.shape[-1] % 32 == 0
            # kernel_backward.h: o_strideM() is head_dim_value * num_heads, and halves need it for delta.
            assert output.transpose(1, 2)[0].is_contiguous()


@pytest.mark.parametrize("name", ["none", "causal", "random"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("given", ["its own output", "heads apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_an_accelerator_are_given_what_they_can_read(dtype, name, lengths, given):
    kernel, (rows, keys) = FlashOrEfficientKernel(), lengths
    inputs = tensors(dtype, 2, rows=rows, keys=rows if name == "causal" else keys)
    query, key, value, grad = (t.to("meta") for t in inputs)
    visible = mask(name, rows, key.shape[2])
    how = scoring(name, None if visible is None else visible.to("meta"), fused=True)
    with AsCudaReads() as read:
        output, lse = kernel.forward(query, key, value, how)
        assert output.shape == query.shape
        assert lse.shape == query.shape[:3]
        kept = output if given == "its own output" else output.contiguous()
        gradients = kernel.backward(grad, query, key, value, kept, lse, how)
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
    flash = dtype == torch.bfloat16 and name != "random"
    assert read.called == (
        ["flash_attention", "flash_attention_backward"]
        if flash
        else ["efficient_attention", "efficient_attention_backward"]
    )


def merged(blocks, query, key, value, grad, softcap=None):
    """Output, log-sum-exp and gradients over ``blocks``."""
    sums = MergedAttention(query, value, SCALE, softcap)
    for block in blocks:
        sums.add(block, key, value)
    output, lse = sums.result()
    gradients = AttentionGradients(grad, query, value, output, lse, SCALE, softcap)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for block in blocks:
        gradients.add(block, key, value, grad_key, grad_value)
    return output, lse, gradients.query, grad_key, grad_value


@pytest.mark.parametrize(
    ("value_width", "softcap"), [(WIDTH, None), (5, None), (WIDTH, 1.5)], ids=["fused", "composed", "capped"]
)
def test_parts_are_merged_by_their_weight_and_rows_that_see_nothing_of_a_part_have_none(value_width, softcap):
    query, key, value, grad = tensors(torch.float64, 2, rows=8, keys=16, value_width=value_width)
    key[:, :, 8:] *= 30  # so that exponentials differ by hundreds
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2, -1]] * 2), torch.tensor([[1, 1, 5, 5, 2, 2, 2, 2]] * 2)
    blocks = [
        Block(rows=slice(0, 8), keys=slice(0, 8), diagonal=True),
        Block(rows=slice(0, 8), keys=slice(8, 16), documents=ids),
    ]
    visible = torch.cat((torch.ones(2, 8, 8).tril().bool(), ids[0][:, :, None] == ids[1][:, None, :]), 2)[:, None]
    assert not visible[0, 0, :, 8:].any(-1).all()
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    output, lse = definition(*leaves, visible, softcap)
    expected = (output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, grad))
    for found, theirs in zip(merged(blocks, query, key, value, grad, softcap), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value_width", [WIDTH, slow(5)], ids=["fused", "composed"])
def test_long_blocks_are_cut_into_rows(value_width):
    length = 1500  # of a mask for two samples, more than 2^22 elements
    query, key, value, grad = tensors(torch.float32, 4, rows=length, keys=length, value_width=value_width)
    ids = torch.arange(length).div(700, rounding_mode="floor").expand(2, length)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    block = Block(rows=slice(0, length), keys=slice(0, length), diagonal=True, documents=(ids, ids))
    with Watch():
        found = merged([block], query, key, value, grad)
    assert largest <= 1 << 22
    visible = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(length, length).tril().bool()
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output, lse = definition(*leaves, visible)
    expected = (output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, grad))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value_width", [WIDTH, 5], ids=["fused", "composed"])
def test_windows_over_several_cuts_hide_what_lies_before_them(value_width):
    length, window = 600, 150  # cuts have 128 rows
    query, key, value, grad = tensors(torch.float64, 2, rows=length, keys=2 * length, value_width=value_width)
    visible = torch.cat((torch.ones(length, length).tril().triu(1 - window), torch.zeros(length, length)), 1)
    visible[:, length:] = torch.ones(length, length).triu(450 - window + 1)
    blocks = [
        Block(rows=slice(0, length), keys=slice(0, length), diagonal=True, window=Window(length=window, distance=0)),
        Block(rows=slice(0, length), keys=slice(length, 2 * length), window=Window(length=window, distance=450)),
    ]
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    output, lse = definition(*leaves, visible.bool()[None, None])
    expected = (output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, grad))
    for found, theirs in zip(merged(blocks, query, key, value, grad), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-9)


def test_a_kernel_that_does_not_fit_gives_way_to_the_composed_one():
    query, _, value, _ = tensors(torch.float32, 2)
    assert isinstance(kernel_for(query, value), MaskedFlashKernel)
    assert isinstance(kernel_for(query, value[..., :5]), ComposedKernel)
    assert not FlashOrEfficientKernel().takes(query.double(), value.double())
    assert not FlashOrEfficientKernel().takes(query[..., :6], value[..., :6])


def test_autocast_does_not_round_what_was_made_wide():
    query, key, value, _ = tensors(torch.float32, 2)
    plain = ComposedKernel().forward(query, key, value, Scoring(scale=SCALE))
    with torch.autocast(HOST.type, dtype=torch.bfloat16):
        cast = ComposedKernel().forward(query, key, value, Scoring(scale=SCALE))
    assert torch.equal(plain[0], cast[0])


def test_heads_that_are_not_side_by_side_are_copied():
    transposed = torch.randn(2, 2, 8, 4).transpose(-1, -2)
    assert contiguous_heads(transposed).stride(-1) == 1
    assert contiguous_heads(torch.ones(1).expand(2, 2, 4, 4)).stride(-1) == 1
    assert contiguous_heads(transposed.transpose(-1, -2)).data_ptr() == transposed.data_ptr()
