"""How often a layer of experts that drops nothing lets the host wait for the device, next to the minimum: none where
one process has all experts and the device reads offsets, else one in forward and none in backward."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import RankPool, process_group
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.devices import register_profile
from nxdt_core.engine.expert import AllToAllDispatcher
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.protocols.plan import ParallelPlan
from tests.distributed.building import CACHE

ROOT = Path(__file__).parents[2]
HIDDEN, FFN, EXPERTS = 16, 32, 4


class AskedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators whose output has a shape that the host must ask the device for, as of ``nonzero`` and ``bincount``, and
    how many operators there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if torch.Tag.dynamic_output_shape in func.tags and self._asks(func, args, kwargs or {}):
            self.asked.append(str(func))
        return func(*args, **(kwargs or {}))

    def _asks(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func is torch.ops.aten.index.Tensor:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return kwargs.get("output_size") is None


def layer(dtype: torch.dtype, *, ranks: int, recompute: str | None, chunks: int) -> nn.Module:
    """On the device, with the share of one of ``ranks`` in the experts."""
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, EXPERTS, top_k=2, normalize=True, balance_coefficient=0.1, z_coefficient=0.1)
    model = nn.Sequential(MixtureOfExperts(router=router, experts=SwiGLUExperts(HIDDEN, FFN, EXPERTS // ranks)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    plan = ParallelPlan(recompute={"Experts": ("0.experts",), "Whole": ("0",)}, recompute_layer="0")
    apply_recompute(model, plan, granularity=recompute and "selective", names=[recompute] if recompute else ())
    model.to(device="abacus", dtype=dtype)
    model[0].router.reset_buffers()
    if ranks > 1:
        model[0].dispatcher = AllToAllDispatcher(dist.group.WORLD, chunks=chunks)
    return model


def count(dtype: torch.dtype, recompute: str | None, grouped: tuple[str, ...], chunks: int) -> list[int]:
    """Waits of the host in forward and in backward, on each rank."""
    sys.path.append(str(ROOT))
    from tests.distributed.abacus import PROFILE, waits

    register_profile(replace(PROFILE, static_shapes=False, all_to_all=True, grouped_products=grouped))
    with process_group(backend="abacus"):
        model = layer(dtype, ranks=dist.get_world_size(), recompute=recompute, chunks=chunks)
        tokens = torch.randn(2, 8, HIDDEN, dtype=dtype).to("abacus").requires_grad_()
        grad = torch.randn(2, 8, HIDDEN, dtype=dtype).to("abacus")
        moments, shapes = [waits()], [AskedShapes(), AskedShapes()]
        with shapes[0]:
            output = model(tokens)
        moments.append(waits())
        with shapes[1]:
            torch.autograd.backward(output, grad)
        moments.append(waits())
        assert tokens.grad is not None
        assert all(mode.operators > 9 and not mode.asked for mode in shapes), [mode.asked for mode in shapes]
        return [after - before for before, after in pairwise(moments)]


def test_shapes_that_data_decide_are_seen() -> None:
    """Operators of the mode that the next test uses; reading by index asks for nothing."""
    values = torch.tensor([0, 3, 1])
    asking = (
        lambda: values.nonzero(),
        lambda: values[values > 0],
        lambda: values.bincount(),
        lambda: values.repeat_interleave(values),
        lambda: values.masked_select(values > 0),
    )
    for ask in asking:
        with AskedShapes() as mode:
            ask()
        assert mode.asked
    with AskedShapes() as mode:
        values[values.clamp(max=2)]
        values.repeat_interleave(values, output_size=4)
    assert not mode.asked


BFLOAT16 = ("bfloat16",)
CASES = [
    pytest.param(1, torch.bfloat16, None, BFLOAT16, 1, 0, id="offsets on the device"),
    pytest.param(1, torch.bfloat16, "Whole", BFLOAT16, 1, 0, id="recomputed"),
    pytest.param(1, torch.float32, "Whole", BFLOAT16, 1, 1, id="no such products in float32, recomputed"),
    pytest.param(2, torch.bfloat16, "Whole", BFLOAT16, 1, 1, id="two ranks, recomputed"),
    pytest.param(2, torch.float32, None, BFLOAT16, 1, 1, id="two ranks, no such products"),
    pytest.param(2, torch.float32, "Experts", (), 1, 1, id="two ranks, recomputed experts"),
    pytest.param(2, torch.bfloat16, "Whole", BFLOAT16, 3, 1, id="two ranks, three chunks, recomputed"),
]


@pytest.mark.parametrize(("ranks", "dtype", "recompute", "grouped", "chunks", "forward"), CASES)
def test_the_host_waits_as_seldom_as_it_can(
    abacus_cache: str,
    ranks: int,
    dtype: torch.dtype,
    recompute: str | None,
    grouped: tuple[str, ...],
    chunks: int,
    forward: int,
) -> None:
    found = RankPool(ranks).run(count, dtype, recompute, grouped, chunks, environment={CACHE: abacus_cache})
    assert found == [[forward, 0]] * ranks


def refuse_chunks() -> str:
    """The error of a run whose experts are to exchange tokens in chunks."""
    sys.path.append(str(ROOT))
    from tests.distributed.test_abacus import LAYOUTS, session

    try:
        session(*LAYOUTS["ep2"], "model.moe.exchange_chunks=2")
    except Exception as error:
        return str(error)
    return ""


def test_chunks_are_refused_where_an_exchange_is_waited_for(abacus_cache: str) -> None:
    """The profile of the device has no all-to-all."""
    for said in RankPool(2).run(refuse_chunks, environment={CACHE: abacus_cache}):
        assert re.search(r"(?s)NXDT-P038.*'layers\.0\.moe\.dispatcher'.*in 2 chunks.*exchange_chunks=1", said)
