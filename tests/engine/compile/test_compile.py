"""Layers compiled one by one: the same results, shared graphs, and the time of compiling on a clock of its own."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from nxdt_core.engine.compile import compile_layers
from nxdt_core.engine.compile_cache import compile_seconds
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.protocols.plan import ParallelPlan
from tests.graph_counts import GraphCounts
from tests.sampling import slow

PLAN = ParallelPlan(recompute={"Layer": ("layers.*",), "First": ("layers.*.first",)})


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(size, 2 * size)
        self.second = nn.Linear(2 * size, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(torch.nn.functional.silu(self.first(hidden)))


class Stack(nn.Module):
    def __init__(self, size: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer(size) for n in range(layers)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, capture_scalar_outputs=False):  # which compile_layers sets
        yield
    torch._dynamo.reset()


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Stack()


def batch(seq: int = 4) -> torch.Tensor:
    return torch.randn(2, seq, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def own(caplog) -> list[logging.LogRecord]:
    """Our own records; torch has hundreds."""
    return [record for record in caplog.records if record.name.startswith("nxdt")]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(batch()).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("backend", "granularity"),
    [("eager", None), ("eager", "full"), ("aot_eager", None), ("aot_eager", "full"), slow("inductor", "full")],
)
def test_compiled_layers_compute_the_same(plain, backend, granularity):
    compiled = copy.deepcopy(plain)
    apply_recompute(compiled, PLAN, granularity=granularity)
    compile_layers(compiled, PLAN, backend=backend)
    found = gradients(compiled)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(found[name], expected, msg=name)


RECOMPUTED = {"kept": (None, ()), "layers": ("full", ()), "parts": ("selective", ("First",))}


@pytest.mark.parametrize(("granularity", "names"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_layers_share_one_graph(granularity, names):
    counter, stack = CompileCounter(), Stack(layers=12)
    apply_recompute(stack, PLAN, granularity=granularity, names=names)
    compile_layers(stack, PLAN, backend=counter)
    gradients(stack)
    assert counter.frame_count == 1


def test_what_is_recomputed_runs_compiled(plain):
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph(*args)

    apply_recompute(plain, PLAN, granularity="full")
    compile_layers(plain, PLAN, backend=backend)
    loss = plain(batch()).square().sum()
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == 6


def test_counts_are_of_the_block(plain):
    compile_layers(plain, PLAN, backend="aot_eager")
    with GraphCounts() as first:
        gradients(plain)
    with GraphCounts() as second:
        gradients(plain)
        with torch.no_grad():
            plain(batch().detach())
    assert (first.graphs, first.breaks, first.recompilations) == (1, 0, 0)
    assert (second.graphs, second.breaks, second.recompilations) == (1, 0, 1)


class Broken(Layer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.first.bias.sum()
        torch._dynamo.graph_break()
        return super().forward(hidden)


def test_a_layer_that_is_no_graph_is_compiled_in_pieces_and_named_once(plain, caplog):
    for name in ("0", "2"):
        plain.layers[name].__class__ = Broken
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, PLAN, backend="eager")
    with GraphCounts() as counts:
        found = gradients(compiled)
        gradients(compiled)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(found[name], 2 * expected, msg=name)
    assert counts.breaks == 1
    (record,) = own(caplog)
    assert record.getMessage().startswith("[NXDT-P090] model.compile: the layer 'layers.0' (Broken) is not one graph")


class Counting(Layer):
    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.calls  # of the instance: up to 2.11, torch does not guard the class's


def test_a_layer_that_is_compiled_too_often_runs_as_written_and_is_named_once(plain, caplog, monkeypatch):
    monkeypatch.setattr("nxdt_core.engine.compile._GRAPHS", 2)
    plain.layers["1"].__class__ = Counting
    compiled = copy.deepcopy(plain)
    with torch._dynamo.config.patch(recompile_limit=2, specialize_int=True):
        compile_layers(compiled, PLAN, backend="eager")
        for calls in range(5):
            plain.layers["1"].calls = compiled.layers["1"].calls = calls
            torch.testing.assert_close(compiled(batch()), plain(batch()))
    (record,) = own(caplog)
    assert record.getMessage().startswith(
        "[NXDT-P091] model.compile: the layer 'layers.1' (Counting) asked for another"
    )


@pytest.mark.parametrize(("granularity", "compiled_before"), [(None, True), ("full", False)])
def test_a_dispatch_mode_sees_every_operation_of_compiled_layers(plain, granularity, compiled_before):
    compiled = copy.deepcopy(plain)
    for model in (plain, compiled):
        apply_recompute(model, PLAN, granularity=granularity)
    compile_layers(compiled, PLAN, backend="aot_eager")
    if compiled_before:
        gradients(compiled)
        compiled.zero_grad()
    with FlopCounterMode(display=False) as expected:
        wanted = gradients(plain)
    with FlopCounterMode(display=False) as counted:
        found = gradients(compiled)
    assert counted.get_total_flops() == expected.get_total_flops() > 0
    torch.testing.assert_close(found, wanted)


class Wrong(Layer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise ValueError("the model's own")


def test_an_error_of_the_model_comes_out_as_it_is(plain, caplog):
    plain.layers["1"].__class__ = Wrong
    compile_layers(plain, PLAN, backend="eager")
    with pytest.raises(ValueError, match="the model's own"):
        plain(batch())
    assert not own(caplog)


@pytest.mark.parametrize(("static_shapes", "graphs"), [(False, 2), (True, 3)])
def test_static_shapes_get_a_graph_each(plain, static_shapes, graphs):
    counter = CompileCounter()
    compile_layers(plain, PLAN, backend=counter, static_shapes=static_shapes)
    for seq in (4, 6, 10):
        plain(batch(seq))
    assert counter.frame_count == graphs


def test_names_of_modules_and_parameters_stay(plain):
    modules, state = [name for name, _ in plain.named_modules()], list(plain.state_dict())
    compile_layers(plain, PLAN, backend="eager")
    assert [name for name, _ in plain.named_modules()] == modules
    assert list(plain.state_dict()) == state


def test_only_layers_are_compiled(plain):
    plain.layers["1"] = nn.Identity()
    compile_layers(plain, PLAN, backend="eager")
    assert [name for name, part in plain.named_modules() if "forward" in vars(part)] == ["layers.0", "layers.2"]


def test_the_time_of_compiling_is_counted_and_no_other(plain):
    compile_layers(plain, PLAN, backend="aot_eager")
    before = compile_seconds()
    gradients(plain)
    compiled = compile_seconds()
    gradients(plain)
    assert before < compiled == compile_seconds()


def gradients_under_fully_shard() -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    """Gradients by parameter plain and compiled, and the number of graphs; two ranks read half a batch each."""
    found = []
    counter = CompileCounter()
    with process_group():
        half = batch().detach().chunk(2)[dist.get_rank()].requires_grad_()
        for compiles in (False, True):
            torch.manual_seed(0)
            model = Stack()
            if compiles:
                compile_layers(model, PLAN, backend=counter)
            for layer in model.layers.values():
                fully_shard(layer)
            fully_shard(model)
            model(half).square().sum().backward()
            found.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})
    return {name: (value, found[1][name], counter.frame_count) for name, value in found[0].items()}


def test_it_composes_with_fully_shard(ranks):
    for found in ranks(2).run(gradients_under_fully_shard):
        assert len(found) == 12
        for one, other, graphs in found.values():
            torch.testing.assert_close(one, other)
            assert graphs == 1
