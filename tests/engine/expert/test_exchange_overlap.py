"""Exchanges of tokens in chunks: what travels while experts compute, and equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.expert import AllToAllDispatcher
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.router import Routing, TopKRouter
from tests.engine.layouts.test_mixtral_layouts import mixtral
from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import train
from tests.sampling import slow

HIDDEN, FFN, EXPERTS, RANKS = 8, 12, 4, 2
PRODUCTS = ("mm", "bmm", "_grouped_mm")


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


class InFlight(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products by how many exchanges are under way, and rows of exchanges that none covers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[int] = []
        self.rows = self.covered_rows = 0
        self._flying: list[tuple[torch.Tensor, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname == "all_to_all_single":
            self._flying.append((output, len(args[0]), len(self.products)))
            self.rows += len(args[0])
        elif func._opname == "wait_tensor":
            (number,) = (n for n, (tensor, _, _) in enumerate(self._flying) if tensor is args[0])
            _, rows, before = self._flying.pop(number)
            self.covered_rows += rows * (len(self.products) > before)
        elif func.namespace == "aten" and func._opname in PRODUCTS:
            self.products.append(len(self._flying))
        return output


def routed(capacity_factor: float | None, rank: int) -> tuple[torch.Tensor, Routing]:
    """Tokens of a rank and where they go; without a capacity rank 1 has one token only."""
    torch.manual_seed(rank)
    hidden = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    hidden = hidden[:1, :1] if rank and capacity_factor is None else hidden
    torch.manual_seed(7)
    router = TopKRouter(HIDDEN, EXPERTS, top_k=2, capacity_factor=capacity_factor).double()
    nn.init.normal_(router.weight)
    with torch.no_grad():
        return hidden.requires_grad_(), router(hidden)


def all_experts() -> SwiGLUExperts:
    torch.manual_seed(3)
    experts = SwiGLUExperts(HIDDEN, FFN, EXPERTS).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def exchange(chunks: int, capacity_factor: float | None) -> tuple[Any, ...]:
    """Output, gradients of tokens and experts, and what was in flight in forward and in backward."""
    with process_group():
        rank = dist.get_rank()
        hidden, routing = routed(capacity_factor, rank)
        experts = all_experts()
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(RANKS)[rank].clone()))
        dispatcher = AllToAllDispatcher(dist.group.WORLD, chunks=chunks)
        with InFlight() as forward:
            output = dispatcher(hidden, routing, experts)
        with InFlight() as backward:
            torch.autograd.backward(output, torch.ones_like(output))
        grads = [parameter.grad for parameter in experts.parameters()]
        seen = [(mode.products, mode.rows, mode.covered_rows) for mode in (forward, backward)]
        return output.detach(), hidden.grad, grads, seen


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_exchanges_travel_while_experts_compute(ranks: Any, capacity_factor: float | None) -> None:
    chunks = 4
    found = ranks(RANKS).run(exchange, chunks, capacity_factor)
    experts = all_experts()
    for rank, (output, grad, _, seen) in enumerate(found):
        hidden, routing = routed(capacity_factor, rank)
        alone = LocalDispatcher()(hidden, routing, experts)
        torch.autograd.backward(alone, torch.ones_like(alone))
        torch.testing.assert_close(output, alone.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, hidden.grad, rtol=1e-12, atol=1e-12)
        for products, rows, covered in seen:
            assert products
            assert min(products) >= 1  # no product without an exchange under way
            # What no product can cover: the first part on its way there and the last one on its way back.
            assert rows - covered <= rows / chunks + 2
    for number, parameter in enumerate(experts.parameters()):
        together = torch.cat([grads[number] for _, _, grads, _ in found])
        torch.testing.assert_close(together, parameter.grad, rtol=1e-12, atol=1e-12)


def test_whole_exchanges_are_over_before_experts_compute(ranks: Any) -> None:
    (_, _, _, seen), *_ = ranks(RANKS).run(exchange, 1, None)
    assert all(set(products) == {0} for products, _, _ in seen)


def in_graphs(chunks: int) -> list[list[int]]:
    """Exchanges under way at each product, in the graphs of forward and of backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[list[int]] = []

    def walk(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        flying, products = set(), []
        for node in graph.graph.nodes:
            name = getattr(node.target, "_opname", "")
            if name == "all_to_all_single" and node.args[0].meta["val"].is_floating_point():
                flying.add(node)
            elif name == "wait_tensor":
                flying.discard(node.args[0])
            elif name in PRODUCTS:
                products.append(len(flying))
        found.append(products)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    with process_group():
        hidden, routing = routed(None, 0)
        dispatcher = AllToAllDispatcher(dist.group.WORLD, chunks=chunks)
        experts = SwiGLUExperts(HIDDEN, FFN, EXPERTS // RANKS).double()
        for parameter in experts.parameters():
            nn.init.normal_(parameter)
        backend = aot_autograd(fw_compiler=walk, bw_compiler=walk)
        compiled = torch.compile(lambda *given: dispatcher(*given, experts), backend=backend, fullgraph=True)
        compiled(hidden, routing).sum().backward()
    return found


@pytest.mark.slow
def test_graphs_of_compiled_layers_keep_the_order(ranks: Any) -> None:
    for forward, backward in ranks(RANKS).run(in_graphs, 3):
        gradients = backward[-2 * len(forward) :]  # products that backward computes again come first
        assert len(gradients) == 2 * len(forward) > 0
        assert min(*forward, *gradients) >= 1


CASES = [
    slow({"dropless": True}, Layout(dp=2, ep=2)),
    slow({"dropless": True}, Layout(dp=2, ep=2, recompute="full")),
    slow({"dropless": True}, Layout(dp=2, ep=2, tp=2, sp=True)),
    slow({"capacity_factor": 0.75}, Layout(dp=2, ep=2)),
    slow({"capacity_factor": 0.75}, Layout(dp=2, ep=2, tp=2, sp=True)),
    slow({"capacity_factor": 0.75}, Layout(dp=2, ep=2, pp=2)),
]


@pytest.mark.parametrize(("moe", "layout"), CASES, ids=str)
def test_a_model_trains_as_one_process_does(ranks: Any, alone: Any, steps: Any, moe: Any, layout: Layout) -> None:
    """With the same dropped tokens, over 20 steps.

    By default one exchange in chunks is compared with none (``test_exchanges_travel_while_experts_compute``), and a
    Mixtral's whole exchanges with one process (tests/engine/layouts/test_mixtral_layouts.py).
    """
    model = {**mixtral(router_aux_loss_coef=0.1, **moe), "num_layers": layout.least_layers}
    chunked = {**model, "moe": {**model["moe"], "exchange_chunks": 3}}
    reports = ranks(layout.world).run(train, layout, "float64", steps(20), chunked, timeout_s=120)
    wrong = computed_wrong("float64", reports, alone(layout, "float64", steps(20), model))
    assert not wrong, "\n".join(wrong)
