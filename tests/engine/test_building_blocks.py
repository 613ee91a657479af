"""What engines of other authors build on: first values by name and offset, ties, parameter groups over ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool
from torch import nn

from nxdt_core.config.schema import ParamGroupConfig
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.engine.parameters import check_overrides, parameter_groups
from nxdt_core.engine.tensor.layers import FeatureShard, PaddedDim
from nxdt_core.engine.weights import allocate, check_rules, draw_local_shard
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.models import BuffersNotReset, InitRulesWrong, NoInitRule
from nxdt_core.errors.training import ParameterGroupEmpty
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice

DOCS = Path(__file__).parents[2] / "docs" / "kinds" / "engine.md"
RULES = [InitRule(pattern="*", distribution="normal", std=0.02)]


class Tied(nn.Module):
    """A head that shares the weights of the embedding, and a table that follows from the configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_buffers(self) -> None:
        """Compute the table."""
        self.table = torch.arange(3.0, device=self.table.device)


@pytest.mark.parametrize(("rows", "columns"), [((0, 6), (0, 8)), ((2, 3), (0, 8)), ((1, 4), (3, 5))])
def test_a_part_is_drawn_as_those_elements_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    whole = torch.empty(6, 8)
    draw_local_shard(LocalShard(whole, (6, 8), TensorSlice.whole((6, 8))), "a.weight", RULES, seed=3)
    region = TensorSlice(offsets=(rows[0], columns[0]), shape=(rows[1] - rows[0], columns[1] - columns[0]))
    part = torch.empty(region.shape)
    draw_local_shard(LocalShard(part, (6, 8), region), "a.weight", RULES, seed=3)
    assert torch.equal(part, whole[rows[0] : rows[1], columns[0] : columns[1]])
    other = torch.empty(6, 8)
    draw_local_shard(LocalShard(other, (6, 8), TensorSlice.whole((6, 8))), "b.weight", RULES, seed=3)
    assert not torch.equal(other, whole)


def test_a_parameter_without_a_rule_is_refused() -> None:
    with raises(NoInitRule):
        draw_local_shard(LocalShard(torch.empty(2), (2,), TensorSlice.whole((2,))), "a", [], seed=3)


def test_memory_keeps_ties_and_computes_buffers() -> None:
    with torch.device("meta"):
        module = Tied()
    allocate(module, torch.device("cpu"), tied=(("embed.weight", "head.weight"),))
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.table, torch.arange(3.0))


def test_a_rule_for_nothing_and_a_drawn_norm_are_refused() -> None:
    names, norms = ["layers.0.norm.weight", "norm.weight"], ("layers.*.norm.weight", "norm.weight")
    right = [
        InitRule(pattern="*norm.weight", distribution="constant"),
        InitRule(pattern="*.bias", distribution="constant"),
    ]
    check_rules([*right, *RULES], names, norms=norms, of="Right")
    with raises(InitRulesWrong, match=r"rules of Slip .*'\*nrom\.weight' matches no parameter"):
        check_rules([InitRule(pattern="*nrom.weight", distribution="constant"), *RULES], names, of="Slip")
    with raises(InitRulesWrong, match=r"'norm\.weight' is drawn from 'normal' by the rule '\*'"):
        check_rules([replace(right[0], pattern="layers.*.norm.weight"), *RULES], names, norms=norms, of="Drawn")


class HeadValues(nn.Module):
    """Two buffers for each head, of which a method computes one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.ones(4), persistent=False)
        self.register_buffer("gain", torch.ones(4), persistent=False)

    def reset_buffers(self) -> None:
        """Compute one of them."""
        self.slope.fill_(0.5)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_buffer_that_nothing_computes_is_refused(sharded: bool) -> None:
    with torch.device("meta"):
        module: nn.Module = HeadValues()
        if sharded:
            spread = PaddedDim(dim=0, block=2, starts=(0, 2), counts=(2, 2))
            module = FeatureShard(module, {}, spread, lambda whole: whole[2:])
    with raises(BuffersNotReset, match=r"buffers 'gain' hold"):
        allocate(module, torch.device("cpu"))
    assert torch.equal(module.slope, torch.full((2 if sharded else 4,), 0.5))


def groups_over_ranks() -> str:
    """What two ranks say of a group whose parameters are on neither, and of one that is on the other rank alone."""
    ranks = Ranks.from_environment()
    ranks.start(torch.device("cpu"))
    own = [f"layers.{ranks.rank}.weight"]
    check_overrides([ParamGroupConfig(params="layers.1.**", lr=0.1)], own, ranks)
    try:
        check_overrides([ParamGroupConfig(params="layers.2.**", lr=0.1)], own, ranks)
    except NxdtError as error:
        return str(error)
    finally:
        ranks.stop()
    return ""


def test_a_group_may_choose_parameters_of_another_rank() -> None:
    said = RankPool(2).run(groups_over_ranks)
    assert said[0] == said[1]
    assert "layers.2.**" in said[0]


def test_a_group_that_chooses_nothing_is_refused_in_one_process() -> None:
    with raises(ParameterGroupEmpty):
        check_overrides([ParamGroupConfig(params="no.**", lr=0.1)], ["a"], RankAgreement())
    net = nn.Linear(2, 2)
    (group,) = parameter_groups(net.named_parameters(), ParallelPlan(), lr=0.1, weight_decay=0.0, decay_norms=False)
    assert group["names"] == ["weight", "bias"]


def test_the_documentation_names_building_blocks_that_exist() -> None:
    table = DOCS.read_text().partition("## Public building blocks")[2].partition("```")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    for row in rows:
        cell = row.split("|")[2]
        paths = re.findall(r"`(nxdt_core[\w.]*)`", cell)
        modules = [path for path in paths if not path.rpartition(".")[2][0].isupper()]
        classes = [path.rpartition(".") for path in paths if path not in modules]
        assert all(hasattr(import_module(module), name) for module, _, name in classes)
        for name in re.findall(r"`(\w+)`", cell):
            assert any(hasattr(import_module(module), name) for module in modules), name
