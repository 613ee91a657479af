"""Each collective's backward is its transpose: ⟨f(x), y⟩ = ⟨x, fᵀ(y)⟩ summed over the ranks; and what it computes."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.collectives import (
    all_to_all,
    all_to_all_rows,
    copy_to_group,
    gather_along,
    reduce_from_group,
    reduce_scatter_along,
    reduce_scatter_into,
)
from nxdt_core.distributed.devices import HOST, PROFILES

SHAPE = (2, 4, 3)
FROM = [[1, 2], [0, 3]]
"""Rows that rank i sends to rank j."""


def own(rank: int, shape=SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def without_all_to_all():
    """The same on a device whose process group has no all-to-all; the collective is not called."""
    lacking = replace(PROFILES[HOST.type], all_to_all=False)
    with patch.dict(PROFILES, {HOST.type: lacking}), patch.object(dist, "all_to_all_single", None):
        return forward_and_backward()


def forward_and_backward():
    """Outputs, and gradients for outputs' gradients of 1, 2, 3, … times (rank + 1), by collective."""
    with process_group():
        group, rank = dist.group.WORLD, dist.get_rank()
        sends, receives = FROM[rank], [row[rank] for row in FROM]
        functions = {
            "copy": lambda x: copy_to_group(x, group),
            "reduce": lambda x: reduce_from_group(x, group),
            "gather 1": lambda x: gather_along(x, 1, group),
            "gather 0": lambda x: gather_along(x, 0, group),
            "gather -1": lambda x: gather_along(x, -1, group),
            "scatter 1": lambda x: reduce_scatter_along(x, 1, group),
            "scatter 0": lambda x: reduce_scatter_along(x, 0, group),
            "all to all": lambda x: all_to_all(x, receives, sends, group),
            "equal all to all": lambda x: all_to_all(x, [1, 1], [1, 1], group, equal=True),
        }
        results = {}
        for name, function in functions.items():
            x = own(rank, {"all to all": (sum(sends), 5), "equal all to all": (2, 5)}.get(name, SHAPE)).requires_grad_()
            y = function(x)
            # A gradient that is a view with strides of its own, as the backward of a transpose gives.
            y.backward((ramp(y.shape) * (rank + 1)).movedim(0, -1).contiguous().movedim(-1, 0))
            results[name] = (y.detach(), x.grad)
        rows = torch.arange(4).view(2, 2) + 10 * rank
        results["rows"] = (all_to_all_rows(rows, group), rows)
        return results


def sums_of_both_kinds():
    """A rank's part of a sum by an exchange, as on this device, and by the process group's own reduce-scatter."""
    with process_group():
        whole = own(dist.get_rank(), (6, 5))
        found = []
        for profile in (PROFILES[HOST.type], replace(PROFILES[HOST.type], reduce_scatter=True)):
            with patch.dict(PROFILES, {HOST.type: profile}), Operations() as called:
                part = torch.empty(2, 5, dtype=whole.dtype)
                reduce_scatter_into(part, whole, dist.group.WORLD)
            found.append((part, called.names))
        return found


class Operations(TorchDispatchMode):
    """Names of the collectives that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def ramp(shape) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)


@pytest.fixture(scope="module")
def results(ranks):
    return ranks(2).run(forward_and_backward)


def test_an_all_to_all_can_be_made_of_gathers(ranks, results) -> None:
    """Bitwise, with gradients, for parts of equal and of unequal sizes."""
    for found, expected in zip(ranks(2).run(without_all_to_all), results, strict=True):
        for name, tensors in expected.items():
            assert all(torch.equal(*pair) for pair in zip(found[name], tensors, strict=True)), name


def test_rows_are_exchanged(results) -> None:
    for rank in range(2):
        assert torch.equal(results[rank]["rows"][0], torch.stack([results[r]["rows"][1][rank] for r in range(2)]))


def test_copy(results) -> None:
    for rank in range(2):
        output, grad = results[rank]["copy"]
        assert torch.equal(output, own(rank))
        assert torch.equal(grad, 3 * ramp(SHAPE))


def test_reduce(results) -> None:
    for rank in range(2):
        output, grad = results[rank]["reduce"]
        torch.testing.assert_close(output, own(0) + own(1))
        assert torch.equal(grad, (rank + 1) * ramp(SHAPE))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(results, dim: int) -> None:
    whole = torch.cat([own(0), own(1)], dim)
    for rank in range(2):
        output, grad = results[rank][f"gather {dim}"]
        assert torch.equal(output, whole)
        assert torch.equal(grad, 3 * ramp(whole.shape).chunk(2, dim)[rank])


@pytest.mark.parametrize("dim", [0, 1])
def test_scatter(results, dim: int) -> None:
    for rank in range(2):
        output, grad = results[rank][f"scatter {dim}"]
        torch.testing.assert_close(output, (own(0) + own(1)).chunk(2, dim)[rank])
        assert torch.equal(grad, torch.cat([ramp(output.shape), 2 * ramp(output.shape)], dim))


def test_a_sum_is_scattered_by_an_exchange_where_the_group_would_sum_all_of_it(ranks) -> None:
    whole = sum(own(rank, (6, 5)) for rank in range(3))
    for rank, ((exchanged, first), (reduced, second)) in enumerate(ranks(3).run(sums_of_both_kinds)):
        assert first == ["alltoall_base_"]
        assert second == ["_reduce_scatter_base_"]
        torch.testing.assert_close(exchanged, whole[2 * rank :][:2])
        torch.testing.assert_close(reduced, exchanged)


def test_all_to_all(results) -> None:
    sent = [own(rank, (sum(FROM[rank]), 5)).split(FROM[rank]) for rank in range(2)]
    for rank in range(2):
        output, grad = results[rank]["all to all"]
        assert torch.equal(output, torch.cat([sent[source][rank] for source in range(2)]))
        received = [torch.Size((sum(row[to] for row in FROM), 5)) for to in range(2)]
        back = [((to + 1) * ramp(received[to])).split([row[to] for row in FROM])[rank] for to in range(2)]
        assert torch.equal(grad, torch.cat(back))


def test_one_rank_has_nothing_to_do() -> None:
    x = own(0)
    assert copy_to_group(x, None) is x
    assert reduce_from_group(x, None) is x
    assert gather_along(x, 1, None) is x
    assert reduce_scatter_along(x, 1, None) is x
    assert all_to_all(x, [2], [2], None) is x


def scatter_uneven() -> str:
    with process_group():
        try:
            reduce_scatter_along(torch.zeros(1, 3), 1, dist.group.WORLD)
        except ValueError as error:
            return str(error)
        return "nothing raised"


def test_uneven_parts_are_refused(ranks) -> None:
    assert ranks(2).run(scatter_uneven) == ["dimension 1 of (1, 3) does not divide over 2 ranks"] * 2
