"""Blocks of 8 bits: what was restored is quantised to the same codes and scales; errors are those of torchao's."""

from __future__ import annotations

import pytest
import torch
from nxdt_plugin_torchao.blocks import RowBlocks, dequantised, quantised
from torchao.optim.subclass_8bit import OptimState8bit

from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.tensor_shards import TensorSlice


def blocks(width: int, *, size: int = 256, first: int = 0, whole: int | None = None) -> RowBlocks:
    shape = (4, first + width if whole is None else whole)
    return RowBlocks.of(ParameterShard(shape=shape, region=TensorSlice((0, first), (4, width))), width, size)


def values(rows: int, width: int, *, signed: bool, exponent: int = 0, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, width, generator=draw) * 10.0 ** torch.randint(-9, 1, (rows, width), generator=draw)
    found[0], found[1, ::3] = 0, 0
    return (found if signed else found.square()) * 10.0**exponent


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_restored_is_quantised_to_the_same(signed):
    for exponent in (-32, -25, -12, -6, 0, 6):
        for place in (blocks(512), blocks(300), blocks(40), blocks(300, first=100, whole=700), blocks(50, size=7)):
            rows = values(16, place.width, signed=signed, exponent=exponent, seed=exponent + 40)
            codes, scales = quantised(rows, place, signed=signed)
            restored = dequantised(codes, scales, place, signed=signed)
            again, scales_again = quantised(restored, place, signed=signed)
            assert torch.equal(again, codes)
            assert torch.equal(scales_again, scales)
            assert torch.equal(dequantised(again, scales_again, place, signed=signed), restored)
            assert (codes.shape, scales.shape) == (rows.shape, (16, place.count))


def test_the_largest_element_of_a_block_is_exact():
    for sign in (1.0, -1.0):
        rows = torch.linspace(-1, 1, 256).mul(0.3)[None].clone()
        rows[0, 17] = sign * 0.7
        codes, scales = quantised(rows, blocks(256), signed=True)
        assert scales == sign * torch.tensor(0.7)
        assert dequantised(codes, scales, blocks(256), signed=True)[0, 17] == sign * torch.tensor(0.7)


def test_squares_are_not_rounded_to_zero():
    rows = torch.zeros(1, 256)
    rows[0, :3] = torch.tensor([1.0, 1e-9, 1e-20])
    restored = dequantised(*quantised(rows, blocks(256), signed=False), blocks(256), signed=False)
    assert (restored > 0).tolist() == (rows > 0).tolist()


def test_errors_are_those_of_torchao():
    for signed in (True, False):
        rows = values(64, 512, signed=signed, seed=3)
        theirs = OptimState8bit.zeros(rows.shape, signed)
        theirs.copy_(rows)
        codes, scales = quantised(rows, blocks(512), signed=signed)
        error = (dequantised(codes, scales, blocks(512), signed=signed) - rows).abs()
        other = (theirs.dequantize() - rows).abs()
        assert error.mean() < 1.05 * other.mean()
        if not signed:
            kept = theirs.codes != 0
            assert torch.equal(codes[kept], theirs.codes[kept])
            assert torch.equal(scales.flatten().clamp(min=1e-12), theirs.scale)


def test_shards_that_are_cut_between_blocks_have_the_codes_of_the_whole():
    rows = values(8, 96, signed=True)
    codes, scales = quantised(rows, blocks(96, size=32), signed=True)
    for first, width in ((0, 32), (32, 64), (64, 32)):
        part = quantised(rows[:, first : first + width], blocks(width, size=32, first=first, whole=96), signed=True)
        assert torch.equal(part[0], codes[:, first : first + width])
        assert torch.equal(part[1], scales[:, first // 32 : (first + width) // 32])
