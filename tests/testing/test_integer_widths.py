"""The backend that finds wide integers finds what Triton cannot compile, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.integer_widths import IntegerWidths

I32 = torch.int32


WIDER = {
    "arange": lambda x, n, t: torch.arange(n, n + len(x), dtype=I32),
    "arange with a cast": lambda x, n, t: torch.arange(n, n + len(x)).to(I32),
    "sum": lambda x, n, t: t + n,
    "product with a size": lambda x, n, t: t * len(x),
    "quotient": lambda x, n, t: torch.arange(len(x), dtype=I32) // n,
    "full": lambda x, n, t: torch.full_like(x, n, dtype=I32),
    "choice": lambda x, n, t: torch.where(x > 0, t, n),
    "clamp": lambda x, n, t: torch.arange(len(x), dtype=I32).clamp(max=n),
    "fill": lambda x, n, t: torch.arange(len(x), dtype=I32).masked_fill(x > 0, n),
}
"""Under torch 2.11 and Triton 3.6, a bitcast of each of them fails to compile for a GPU."""
ALIKE = {
    "arange of a size": lambda x, n, t: torch.arange(len(x), dtype=I32),
    "arange of a size with a cast": lambda x, n, t: torch.arange(len(x)).to(I32),
    "cast of a sum with a tensor": lambda x, n, t: (torch.arange(n, n + len(x)) // n + t).to(I32),
    "quotient of tensors": lambda x, n, t: torch.arange(len(x), dtype=I32).div(t, rounding_mode="trunc"),
    "comparison": lambda x, n, t: torch.arange(len(x), dtype=I32) < n,
    "product of floats": lambda x, n, t: (x * n).view(I32),
}
"""A bitcast of each of them compiles there."""


@pytest.mark.parametrize(("function", "wider"), [*((each, True) for each in WIDER), *((each, False) for each in ALIKE)])
def test_what_triton_cannot_compile_is_found(function, wider):
    found = IntegerWidths()
    torch._dynamo.reset()
    compiled = torch.compile((WIDER | ALIKE)[function], dynamic=True, fullgraph=True, backend=found)
    compiled(torch.ones(100), 7, torch.ones((), dtype=I32))
    assert found.dynamic
    assert bool(found.found) == wider
