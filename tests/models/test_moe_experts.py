"""Grouped products against one product a group, over the dtypes and shapes that the fast kernel takes or refuses."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import RowGroups, SwiGLUExperts, grouped_linear

COUNTS = [[3, 1, 4], [0, 5, 3], [4, 4, 0], [0, 8, 0], [0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("features", [(16, 24), (10, 24), (16, 9)], ids=["aligned", "odd-in", "odd-out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_group_meets_its_own_matrix(dtype, features, counts):
    torch.manual_seed(0)
    size_in, size_out = features
    rows = torch.randn(sum(counts), size_in, dtype=dtype, requires_grad=True)
    weights = torch.randn(3, size_out, size_in, dtype=dtype, requires_grad=True)
    output = grouped_linear(rows, weights, RowGroups(torch.tensor(counts)))
    expected = torch.cat([part @ weight.t() for part, weight in zip(rows.split(counts), weights, strict=True)])
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    for found, wanted in zip(
        torch.autograd.grad(output, (rows, weights), grad),
        torch.autograd.grad(expected, (rows, weights), grad),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_equal_groups_may_be_a_dimension():
    torch.manual_seed(0)
    rows, weights = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    expected = grouped_linear(rows.flatten(0, 1), weights, RowGroups(torch.tensor([4, 4, 4]))).view(3, 4, 6)
    torch.testing.assert_close(grouped_linear(rows, weights, None), expected)


@pytest.mark.parametrize("groups", [None, RowGroups(torch.tensor([4, 4, 4]))], ids=["padded", "ordered"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_have_the_layout_of_parameters_so_that_nothing_copies_them(groups, autocast):
    torch.manual_seed(0)
    leaves = [torch.randn(3, 4, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)]
    arriving = torch.randn(3, 4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows, weights = leaves if groups is None else (leaves[0].flatten(0, 1), leaves[1])
        product = grouped_linear(rows, weights, groups)
        expected = torch.bmm(leaves[0], leaves[1].transpose(1, 2))
    assert product.dtype == expected.dtype
    found = torch.autograd.grad(product, leaves, arriving.view_as(product).to(product.dtype))
    assert found[1].is_contiguous()
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, arriving.to(product.dtype)))
    (frozen,) = torch.autograd.grad(grouped_linear(leaves[0], leaves[1].detach(), None).sum(), leaves[:1])
    torch.testing.assert_close(frozen, leaves[1].detach().sum(1, keepdim=True).expand_as(frozen))


@pytest.mark.parametrize("bias", [False, True])
def test_an_expert_is_a_feed_forward_block(bias):
    torch.manual_seed(0)
    experts, block = SwiGLUExperts(8, 12, 3, bias=bias), SwiGLU(8, 12, bias=bias)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.randn(6, 8)
    ordered, padded = experts(rows, RowGroups(torch.tensor([2, 0, 4]))), experts(rows.view(3, 2, 8)).flatten(0, 1)
    for expert, own, filled in ((0, slice(0, 2), slice(0, 2)), (2, slice(2, 6), slice(4, 6))):
        named = {name.removesuffix("_bias"): name for name, _ in experts.named_parameters()}
        state = {f"{name}.weight": getattr(experts, name)[expert].detach() for name in named}
        if bias:
            state |= {f"{name}.bias": getattr(experts, f"{name}_bias")[expert].detach() for name in named}
        block.load_state_dict(state)
        torch.testing.assert_close(ordered[own], block(rows[own]))
        torch.testing.assert_close(padded[filled], block(rows[filled]))
    assert repr(experts).startswith("SwiGLUExperts(\n  3 experts, 8 -> 12 -> 8")


@pytest.mark.parametrize("counts", [RowGroups(torch.tensor([3, 0, 5])), None], ids=["ordered", "padded"])
def test_dropout_falls_between_the_matrices(counts):
    torch.manual_seed(0)
    experts = SwiGLUExperts(8, 8, 3, dropout=0.25).double()
    for matrix in experts.parameters():
        torch.nn.init.normal_(matrix)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    with torch.no_grad():
        experts.down_proj.copy_(rotation)
    rows = torch.randn(8, 8) if counts is not None else torch.randn(3, 8, 8)
    # What was between the matrices, from what came out.
    dropped, whole = (experts.train(training)(rows.double(), counts) @ rotation for training in (True, False))
    kept = dropped.abs() > 1e-12
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
