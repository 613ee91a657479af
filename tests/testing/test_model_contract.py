"""Right models that the contract of models once failed."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.run import fresh
from torch import nn

from nxdt_core.protocols.plan import ParallelPlan
from tests.testing.mutants.small_model import HEADS, WIDTH, Small, SmallBuilder


class _NormOfHeads(Small):
    """A norm has a row of scales for each head, which makes it a matrix by its shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.heads_norm = nn.Module()
        self.heads_norm.weight = nn.Parameter(torch.ones(HEADS, WIDTH // HEADS))


class _Builder(SmallBuilder):
    model = _NormOfHeads
    names: tuple[str, ...] = ("heads_norm.weight",)

    def plan(self) -> ParallelPlan:
        return ParallelPlan(norms=("norm.weight", "layers.*.norm.weight", *self.names))


class _NotANorm(_Builder):
    names = ()


def _count(builder: SmallBuilder) -> None:
    ModelContract().test_operations_follow_from_the_weights(builder, fresh(builder))


def test_scales_of_a_norm_are_no_matrix() -> None:
    _count(_Builder())
    with pytest.raises(AssertionError, match="count six for each weight"):
        _count(_NotANorm())
