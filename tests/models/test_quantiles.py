"""Normal quantiles by a table, next to torch's own."""

from __future__ import annotations

import torch

from nxdt_core.models.random.init import normal_quantiles


def test_they_agree_with_torchs_from_the_smallest_probability_to_a_half():
    generator = torch.Generator().manual_seed(0)
    exponents = -1 - 52 * torch.rand(200_000, generator=generator, dtype=torch.float64)
    even = torch.rand(200_000, generator=generator, dtype=torch.float64) / 2
    ends = 2.0 ** -torch.arange(1, 54, dtype=torch.float64)  # where one polynomial ends and the next begins
    below = torch.cat([2**exponents, even, ends, ends * (1 - 2.0**-52)]).clamp(min=2.0**-53)
    torch.testing.assert_close(normal_quantiles(below), torch.special.ndtri(below), rtol=2e-14, atol=2e-14)


def test_what_is_above_is_the_mirror_of_what_is_below():
    below = torch.linspace(2.0**-53, 0.5 - 2.0**-53, 10_001, dtype=torch.float64)
    assert torch.equal(normal_quantiles(-below), -normal_quantiles(below))
    assert (normal_quantiles(below) < 0).all()
    assert normal_quantiles(torch.tensor([2.0**-53], dtype=torch.float64)) < -8.2
