"""Masks of experts' rows: as random as torch's own, and a function of the token, the expert and the feature."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.moe.router import Routing
from nxdt_core.models.random.dropout import Dropout, RowPart, TokenNumbers, encoded_name
from nxdt_core.protocols.step_context import StepContext

IDS = torch.zeros(4, 64, dtype=torch.int64)
WIDTH = 256


def mask(keys, *, name="a", step=1, part=0, width=WIDTH, p=0.25):
    context = StepContext(numbers=torch.tensor([0, step, 0]), ids=IDS, expert_rows=keys)
    return RowPart(name=encoded_name(name), feature_part=part).draw(torch.empty(*keys.shape, width), p, context)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_every_row_and_every_feature_keeps_its_share(p):
    kept = mask(torch.arange(4096), p=p).double()
    spread = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * spread / kept.numel() ** 0.5
    for dim in (0, 1):
        deviations = (kept.mean(dim) - (1 - p)) * kept.shape[dim] ** 0.5 / spread
        assert deviations.std() == pytest.approx(1, abs=0.15)
        assert deviations.abs().max() < 6


def test_rows_and_features_are_independent():
    kept = mask(torch.cat([torch.arange(2048), torch.arange(2048) + 2**33])).double() - 0.75
    by_row = (kept @ kept.T) / (WIDTH * 0.1875)
    by_feature = (kept.T @ kept) / (len(kept) * 0.1875)
    for found, count in ((by_row, WIDTH), (by_feature, len(kept))):
        off = found - torch.diag(found.diag())
        assert off.abs().max() < 7 / count**0.5
    shifted = (kept[:-1, 1:] * kept[1:, :-1]).mean() / 0.1875
    assert abs(shifted) < 5 / kept.numel() ** 0.5


def test_another_step_module_or_expert_has_another_mask():
    keys = torch.arange(512)
    one = mask(keys)
    assert torch.equal(one, mask(keys))
    for other in (mask(keys, step=2), mask(keys, name="b"), mask(keys + 512)):
        assert (one == other).double().mean() == pytest.approx(0.625, abs=0.01)


def test_a_part_of_the_features_has_that_part_of_the_mask():
    keys = torch.arange(64)
    parts = [mask(keys, part=part, width=WIDTH // 2) for part in (0, 1)]
    assert torch.equal(torch.cat(parts, 1), mask(keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [None, 7])
def test_a_dispatcher_gives_each_row_its_token_and_expert(dtype, capacity):
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(IDS.numel())])
    counts = experts.flatten().bincount(minlength=5)
    slots = None
    if capacity is not None:
        slots = torch.full_like(experts, -1)
        for expert in range(5):
            slots[tuple((experts == expert).nonzero()[:capacity].T)] = torch.arange(capacity)
    routing = Routing(
        experts=experts, weights=torch.full((len(experts), 2), 0.5), counts=counts, slots=slots, capacity=capacity
    )
    dispatcher, dropout = LocalDispatcher(), Dropout(0.5, dispatched=True)
    dispatcher.numbers, dropout.part = TokenNumbers(), RowPart(name=encoded_name("a"))
    step = StepContext(numbers=torch.tensor([0, 1, 3]), ids=IDS)
    hidden = torch.ones(*IDS.shape, 8, dtype=dtype)
    dropped = []
    dispatcher.run(hidden, routing, lambda rows, *groups: dropped.append(dropout(rows)) or rows, step=step)
    found = dropped[0].reshape(-1, 8) != 0
    tokens = torch.arange(IDS.numel()) + 3 * IDS.shape[1]
    if capacity is None:
        order = experts.flatten().argsort(stable=True)
        keys = tokens[order // 2] * 5 + experts.flatten()[order]
    else:
        keys = torch.cat([tokens[(experts == expert).any(1)][:capacity] * 5 + expert for expert in range(5)])
    assert torch.equal(found, mask(keys, width=8, p=0.5))
