"""Weights that travel in autocast's dtype arrive as products would cast them, all others as they were."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.ranks import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nxdt_core.engine.data.fsdp import GatherDtypes, product_weights, set_gather_dtypes
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.updates import Update, UpdatedLinear
from nxdt_core.protocols.plan import ParallelPlan
from tests.engine.test_traffic import STRATEGY, configured, trained

PLAN = ParallelPlan(
    tensor={
        "table": "vocab_embedding",
        **dict.fromkeys(("first", "second", "adapted", "frozen"), "column"),
        "head": "vocab_head",
    },
    tensor_blocks=("first",),
    tied=(("table.weight", "head.weight"),),
)


class Reading(Update):
    """It says that it reads the weight, as is the default."""


class Adding(Update):
    reads_weight = False


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = RMSNorm(5)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 5)
        self.adapted, self.frozen = (UpdatedLinear(nn.Linear(5, 5), update) for update in (Reading(), Adding()))
        self.gate = nn.Linear(5, 2)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight


NARROW = {"first.weight", "second.weight", "frozen.weight"}


def test_only_what_a_matrix_product_alone_reads_is_narrow():
    assert product_weights(Small(), PLAN) == NARROW


def gathered(asynchronous: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What parameters are on this rank before sharding, and once they are gathered."""
    torch.manual_seed(0)
    module = Small()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with process_group():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        set_gather_dtypes(module, GatherDtypes(dtype=torch.bfloat16, two_byte=product_weights(module, PLAN)), names)
        handle = module.unshard(async_op=asynchronous)
        if handle is not None:
            handle.wait()
        return whole, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_gathered_is_what_autocast_makes_of_it(ranks, asynchronous):
    for whole, found in ranks(2).run(gathered, asynchronous):
        for name, value in whole.items():
            assert torch.equal(found[name], value.bfloat16().float() if name in NARROW else value), name


def losses() -> list[list[float]]:
    """Without ZeRO, and of ZeRO-3."""
    strategies = (f"{STRATEGY}zero1=false", f"{STRATEGY}zero_stage=3")
    with process_group():
        return [trained(configured("llama-tiny", "autocast", 2, strategy), steps=3) for strategy in strategies]


def test_losses_are_those_without_gathering(ranks):
    for expected, found in ranks(2).run(losses, timeout_s=240):
        assert expected == pytest.approx(found, rel=1e-6)
