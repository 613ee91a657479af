"""Initial weights that a device draws itself: the same as the host's, bitwise, in every layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.distributed.devices import HOST, current_device, profile_of, register_profile
from nxdt_core.models.random import init
from nxdt_core.models.random.init import draw, fill
from nxdt_core.protocols.plan import InitRule
from tests.distributed.building import CACHE

SHAPE = (301, 503)
DISTRIBUTIONS = ("normal", "truncated_normal", "uniform")


def differences(device: torch.device, distribution: str, dtype: torch.dtype) -> tuple[int, int]:
    """In how many elements a parameter on ``device`` differs from the host's, and its blocks from its own elements."""
    rule = InitRule(pattern="*", distribution=distribution, mean=0.1)  # type: ignore[arg-type]
    whole = torch.zeros(SHAPE, dtype=dtype, device=device)
    fill(whole, rule, name="w", seed=1)
    from_host = (whole.cpu() != draw(SHAPE, rule, name="w", seed=1, dtype=dtype)).sum()
    in_blocks = 0
    for rows, columns in [
        (slice(0, 150), slice(0, 503)),
        (slice(150, 301), slice(7, 250)),
        (slice(3, 4), slice(502, 503)),
    ]:
        block = torch.zeros_like(whole[rows, columns], memory_format=torch.contiguous_format)
        fill(block, rule, name="w", seed=1, shape=SHAPE, offsets=(rows.start, columns.start))
        in_blocks += int((block.cpu() != whole[rows, columns].cpu()).sum())
    return int(from_host), in_blocks


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_accelerator_draws_what_the_host_draws(monkeypatch, distribution, dtype):
    """Also tile by tile."""
    device = current_device()
    assert differences(device, distribution, dtype) == (0, 0)
    monkeypatch.setattr(init, "_TILE", 1000)
    assert differences(device, distribution, dtype) == (0, 0)


@pytest.mark.accelerator
def test_an_accelerator_draws_in_bounded_memory_and_not_on_the_host(monkeypatch):
    device = current_device()
    if not profile_of(device).float64:
        pytest.skip("the host draws for a device without float64")
    weights = torch.zeros(2**27, dtype=torch.bfloat16, device=device)
    profile_of(device).operations.reset_max_memory(device)
    monkeypatch.setattr(init, "_TILE_ON_HOST", 0)  # of which no tile can be made
    fill(weights, InitRule(pattern="*", distribution="normal"), name="w", seed=1)
    peak = profile_of(device).operations.max_memory_bytes(device)
    assert peak is None or peak - weights.nbytes <= 2**30


def drawn_where(float64: bool) -> tuple[list[tuple[int, int]], set[str]]:
    """Differences on a device with or without float64, and the types of devices that drew."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.distributed.abacus import PROFILE

    register_profile(replace(PROFILE, float64=float64))
    device, types, original = torch.device(PROFILE.device_type), set(), init._draw_tile

    def noted(flat, *arguments):
        types.add(flat.device.type)
        original(flat, *arguments)

    init._draw_tile = noted
    fill(torch.zeros(3, device=device), InitRule(pattern="*", distribution="normal"), name="w", seed=1)
    init._draw_tile = original
    found = []
    for tile in (init._TILE, 1000):
        init._TILE = tile
        found += [differences(device, distribution, torch.float32) for distribution in DISTRIBUTIONS]
    return found, types


@pytest.mark.parametrize("float64", [True, False])
def test_a_device_with_float64_draws_itself_and_the_host_for_others(abacus_cache, float64):
    ((found, types),) = RankPool(1).run(drawn_where, float64, environment={CACHE: abacus_cache})
    assert found == [(0, 0)] * 2 * len(DISTRIBUTIONS)
    assert types == {"abacus" if float64 else HOST.type}
