"""Right models that the contract of models once failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.layouts import LAYOUTS, compare
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


def test_what_keeps_a_rank_from_training_is_said() -> None:
    three = replace(LAYOUTS["tp"], settings=("distributed_strategy.tensor_model_parallel_size=3",))
    (problem,) = compare(SmallBuilder(), three)
    assert problem.startswith("it cannot be trained: ")
    assert "NXDT-C016" in problem
