"""Kernels of stochastic rounding: the same bits compiled and not, bytes and launches counted, no recompilation."""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config, metrics
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nxdt_core.distributed.devices import HOST, current_device
from nxdt_core.engine.optim import updates as kernels
from nxdt_core.engine.optim.updates import (
    AdamUpdates,
    BlockKernel,
    StochasticRounding,
    StochasticUpdates,
    backend_on,
    can_compile,
    round_into,
    separate_rows,
    stand_ins,
)
from nxdt_core.engine.precision import rounded_weights
from nxdt_core.models.random.rounding import hashed, noises, rounded
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.tensor_shards import TensorSlice
from tests.integer_widths import IntegerOperations, IntegerWidths
from tests.sampling import slow

CUT = ParameterShard(shape=(160, 90), region=TensorSlice((3, 45), (157, 45)))
"""Rows that do not follow each other in the whole, as under tensor parallelism."""


def whole(*shape):
    return ParameterShard(shape=shape, region=TensorSlice.whole(shape))


PLACES = {"matrix": whole(300, 401), "norm": whole(512), "cut": CUT, "one": whole(1), "none": whole(0, 4)}
STATES = {"float32": 22, "bfloat16": 14}
"""Bytes of an element that a step of Adam reads and writes: weights, gradients and both parts of the state."""


def made(
    places,
    *,
    state="float32",
    optimizer=torch.optim.AdamW,
    backend="eager",
    seed=0,
    weights_in=torch.bfloat16,
    device=HOST,
    general=False,
):
    """Weights by name, what updates them, and the optimizer and the keys of its state."""
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: nn.Parameter(torch.randn(place.region.shape, generator=draw).to(device, weights_in))
        for name, place in places.items()
    }
    trained = stand_ins(weights)
    inner = optimizer(list(trained.values()), lr=1e-2, weight_decay=0.1)
    kind = AdamUpdates if AdamUpdates.handles(inner) and not general else StochasticUpdates
    updates = kind(inner, weights, places, trained, StochasticRounding(seed=7, state=state), backend=backend)
    return weights, updates, inner, trained


def give_gradients(weights, step, scale=1.0):
    draw = torch.Generator().manual_seed(step)
    for weight in weights.values():
        weight.grad = scale * torch.randn(weight.shape, generator=draw).to(weight)


def stepped(*arguments, steps=3, found_inf=None, divisor=None, gradients=1.0, **options):
    """Weights and state after some steps."""
    weights, updates, inner, trained = made(*arguments, **options)
    if found_inf is not None:
        inner.found_inf = torch.tensor(found_inf)
    if divisor is not None:
        inner.grad_scale = torch.tensor(divisor)
    for step in range(steps):
        give_gradients(weights, step, gradients)
        updates.apply(step)
    states = {name: inner.state[stand_in] for name, stand_in in trained.items()}
    return {name: weight.detach() for name, weight in weights.items()}, states


@contextmanager
def counting_bytes():
    """Let inductor count what the graphs that it compiles within the block read and write, and their kernels."""
    torch._dynamo.reset()
    torch._logging.set_logs(inductor_metrics=True)
    metrics.reset()
    try:
        with config.patch(fx_graph_cache=False):
            yield metrics
    finally:
        torch._logging.set_logs()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "state"),
    [slow("matrix", "float32"), slow("matrix", "bfloat16"), slow("cut", "float32"), slow("cut", "bfloat16")],
)
def test_a_step_of_adam_is_one_kernel_that_touches_each_element_once(state, name):
    with counting_bytes() as counted:
        stepped({name: PLACES[name]}, state=state, backend="compile", steps=1)
    assert counted.generated_kernel_count == 1
    elements = PLACES[name].region.elements
    assert STATES[state] * elements <= counted.num_bytes_accessed <= STATES[state] * elements + 200


@pytest.mark.slow
def test_a_step_in_float32_reads_and_writes_28_bytes_for_each_element():
    """Also where it is clipped and may be rejected: torch's fused kernel would write the gradients back."""
    weight = nn.Parameter(torch.randn(300, 401))
    weight.grad = torch.randn(300, 401)
    inner = torch.optim.AdamW([weight])
    inner.grad_scale, inner.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with counting_bytes() as counted:
        AdamUpdates(inner, {"w": weight}, {"w": whole(300, 401)}, {"w": weight}, backend="compile").apply(1)
    assert counted.generated_kernel_count == 1
    assert 28 * weight.numel() <= counted.num_bytes_accessed <= 28 * weight.numel() + 200


@pytest.mark.parametrize(("state", "most"), [("bfloat16", 25), ("float32", 16)])
def test_integer_operations_of_a_step(monkeypatch, state, most):
    """For each element of whole rows, in the graph that the compiler gets."""
    counted = IntegerOperations()
    profile = replace(kernels.profile_of(HOST), compile_backend=counted)
    monkeypatch.setattr(kernels, "profile_of", lambda device: profile)
    torch._dynamo.reset()
    stepped({"matrix": PLACES["matrix"]}, state=state, backend="compile", steps=1, found_inf=0.0, divisor=2.0)
    assert 0 < sum(counted.found.values()) <= most, counted.found


@pytest.mark.slow
def test_masters_are_kept_and_rounded_in_one_kernel(monkeypatch):
    monkeypatch.setattr("nxdt_core.engine.precision.backend_on", lambda device: "compile")
    master = nn.Parameter(torch.randn(300, 401))
    before = master.detach().clone()
    with counting_bytes() as counted, rounded_weights([(master, "w", whole(300, 401))], StochasticRounding(seed=0), 1):
        found = master.detach().clone()
    assert counted.generated_kernel_count == 1
    # 12 bytes an element: read once, written twice. Inductor counts the read once for each of the two.
    assert counted.num_bytes_accessed <= 16 * master.numel() + 200
    assert torch.equal(master, before)
    monkeypatch.undo()
    with rounded_weights([(master, "w", whole(300, 401))], StochasticRounding(seed=0), 1):
        assert torch.equal(master, found)
        assert torch.equal(master, master.bfloat16().float())
        assert not torch.equal(master, before)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_compiled_kernels_give_the_bits_of_eager_ones(state):
    options = {"state": state, "optimizer": torch.optim.Adam if state == "bfloat16" else torch.optim.AdamW}
    assert_same_bits(stepped(PLACES, backend="compile", **options), stepped(PLACES, **options))


def assert_same_bits(found, expected):
    """Both are pairs of weights and states."""
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), name
        for leaf, value in expected[1][name].items():
            assert torch.equal(found[1][name][leaf], value), (name, leaf)


BLOCKS = {
    "more than one chunk": whole(7, 2**14 + 3),
    "cut along three dimensions": ParameterShard(shape=(5, 6, 70), region=TensorSlice((1, 2, 3), (3, 4, 40))),
    "rows of one element": ParameterShard(shape=(300, 3), region=TensorSlice((0, 1), (300, 1))),
    "numbers above 32 bits": ParameterShard(
        shape=(2**20, 2**20), region=TensorSlice((2**19 + 1, 2**20 - 50), (60, 50))
    ),
}


def rounded_masters(places, backend, device=HOST):
    """Masters as a block sees them, on the host; after it they are as before."""
    draw = torch.Generator().manual_seed(0)
    before = {name: torch.randn(place.region.shape, generator=draw) for name, place in places.items()}
    masters = {name: nn.Parameter(value.to(device, copy=True)) for name, value in before.items()}
    of_places = [(masters[name], name, place) for name, place in places.items()]
    with (
        mock.patch("nxdt_core.engine.precision.backend_on", return_value=backend),
        rounded_weights(of_places, StochasticRounding(seed=0), 1),
    ):
        found = {name: master.detach().to(HOST, copy=True) for name, master in masters.items()}
    assert all(torch.equal(masters[name].to(HOST), value) for name, value in before.items())
    assert all(torch.equal(value, value.bfloat16().float()) for value in found.values())
    return found


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.accelerator
@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_an_accelerator_rounds_to_the_bits_of_the_host(backend):
    """Whole tensors, and shards by columns."""
    device = current_device()
    assert_equal(rounded_masters(PLACES | BLOCKS, backend, device), rounded_masters(PLACES | BLOCKS, "eager"))
    assert_equal(rounded_extremes(backend, device), rounded_extremes("eager"))


@pytest.mark.accelerator
@pytest.mark.parametrize("state", STATES)
def test_a_step_of_adam_on_an_accelerator_is_that_of_the_host(state):
    """But for what is on the edge between two values: an accelerator merges products and sums."""
    places = {name: place for name, place in (PLACES | BLOCKS).items() if place.region.elements > 1000}
    device = current_device()
    found, _ = stepped(places, state=state, device=device, backend=backend_on(device), steps=1)
    expected, _ = stepped(places, state=state, steps=1)
    for name, weight in expected.items():
        assert_few_apart(found[name].to(HOST), weight)


QUICKLY = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
"""Without the headers of later kernels, and without a program that shows that the compiler knows the processor."""


def test_extremes_are_rounded_alike_compiled_and_not():
    with config.patch(QUICKLY):
        assert_equal(rounded_extremes("compile"), rounded_extremes("eager"))


def rounded_extremes(backend, device=HOST):
    """Rounded values on the host, and signs of those that are numbers."""
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.39e38, -3.4e38, float("inf"), float("nan")]).repeat(100)
    (key,) = separate_rows(torch.tensor([[12345, -77, 99, 0]], dtype=torch.int32, device=device), backend)
    target = torch.zeros(900, dtype=torch.bfloat16, device=device)
    BlockKernel(round_into, backend=backend)(whole(900), (target, values.to(device)), key)
    found = target.to(HOST)
    return found, torch.signbit(found[~found.isnan()])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("state", STATES)
def test_the_arithmetic_is_that_of_torch(optimizer, state):
    places = {name: place for name, place in PLACES.items() if place.region.elements}
    weights, states = stepped(places, state=state, optimizer=optimizer, steps=5)
    expected, expected_states = rounded_steps_of_torch(places, state, optimizer, steps=5)
    for name, weight in expected.items():
        assert_few_apart(weights[name], weight)
        assert states[name].keys() == expected_states[name].keys()
        for leaf, value in expected_states[name].items():
            if value.dtype == torch.bfloat16:
                assert_few_apart(states[name][leaf], value)
            else:
                torch.testing.assert_close(states[name][leaf], value, rtol=1e-5, atol=1e-6, msg=f"{name} {leaf}")


def rounded_steps_of_torch(places, state, optimizer, steps):
    """Weights and state of torch's optimizer in float32, which are rounded after each step."""
    weights, *_ = made(places)
    trained = {name: nn.Parameter(weight.detach().float()) for name, weight in weights.items()}
    inner = optimizer(list(trained.values()), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        give_gradients(weights, step)
        for name, stand_in in trained.items():
            stand_in.grad = weights[name].grad.float()
        inner.step()
        for name, stand_in in trained.items():
            place, leaves = places[name], inner.state[stand_in]
            region = [
                slice(first, first + size) for first, size in zip(place.region.offsets, place.region.shape, strict=True)
            ]
            numbers = torch.arange(math.prod(place.shape), dtype=torch.int32).view(place.shape)[tuple(region)]
            drawn = noises(hashed(numbers, StochasticRounding(seed=7).keys(step, [name], HOST)[0]), 3)
            stand_in.data = rounded(stand_in.data, drawn[0])
            for leaf, noise in zip(("exp_avg", "exp_avg_sq"), drawn[1:] * (state == "bfloat16"), strict=False):
                leaves[leaf] = rounded(leaves[leaf], noise)
    dtype = getattr(torch, state)
    narrow = {
        name: {leaf: value.to(dtype) if value.dim() else value for leaf, value in inner.state[stand_in].items()}
        for name, stand_in in trained.items()
    }
    return {name: stand_in.detach().bfloat16() for name, stand_in in trained.items()}, narrow


def assert_few_apart(found, expected):
    """Of what is rounded stochastically, those whose noise is on the edge."""
    assert found.dtype == expected.dtype
    assert float((found != expected).double().mean()) < 1e-3


def test_what_is_not_torchs_adam_takes_the_general_way():
    class Mine(torch.optim.AdamW):
        pass

    over = [nn.Parameter(torch.zeros(1))]
    assert AdamUpdates.handles(torch.optim.AdamW(over))
    assert not AdamUpdates.handles(Mine(over))
    assert not AdamUpdates.handles(torch.optim.AdamW(over, amsgrad=True))
    assert not AdamUpdates.handles(torch.optim.SGD(over))


def test_a_step_that_is_rejected_on_the_device_changes_nothing():
    weights, states = stepped(PLACES, steps=1, found_inf=1.0)
    untouched, _ = stepped(PLACES, steps=0)
    for name, weight in untouched.items():
        assert torch.equal(weights[name], weight)
        assert not any(value.any() for value in states[name].values())
    accepted, _ = stepped(PLACES, steps=1, found_inf=0.0)
    plain, _ = stepped(PLACES, steps=1)
    assert all(torch.equal(accepted[name], plain[name]) for name in plain)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("way", ["eager", "general"])
def test_gradients_are_divided_by_the_scale(way, optimizer):
    """By a power of two, so that bfloat16 holds the quotients as well."""
    options = {"general": True} if way == "general" else {"backend": way}
    options["optimizer"] = partial(optimizer, fused=way == "general")
    weights, states = stepped(PLACES, divisor=4.0, **options)
    expected, expected_states = stepped(PLACES, gradients=0.25, **options)
    undivided, _ = stepped(PLACES, **options)
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight)
        assert all(torch.equal(states[name][leaf], value) for leaf, value in expected_states[name].items())
    assert not all(torch.equal(undivided[name], weight) for name, weight in expected.items())


def test_weights_that_are_not_contiguous_are_updated():
    place = whole(6, 4)
    expected, _ = stepped({"w": place}, steps=1)
    weights, updates, *_ = made({"w": place})
    weights["w"].data = weights["w"].data.t().contiguous().t()
    give_gradients(weights, 0)
    updates.apply(0)
    assert not weights["w"].is_contiguous()
    assert torch.equal(weights["w"].detach(), expected["w"])


def test_pieces_of_a_block_are_rounded_as_the_block(monkeypatch):
    expected, _ = stepped(PLACES)
    monkeypatch.setattr(kernels, "_PIECE_ON_HOST", 1000)
    found, _ = stepped(PLACES)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Launches(TorchDispatchMode):
    """Counts kernels: operations that neither make views nor only allocate, and calls of compiled ones."""

    def __init__(self):
        super().__init__()
        self.operations = self.compiled = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        views = any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns)
        self.operations += not views and not func.name().startswith("aten::empty")
        return func(*args, **(kwargs or {}))

    def stand_in(self, function, backend):
        def called(*arguments):
            self.compiled += 1
            with _disable_current_modes():
                function(*arguments)

        return called


def test_compiled_kernels_run_as_written_under_a_dispatch_mode():
    with Launches() as counted:
        found = stepped({"cut": CUT}, backend="compile")
    assert counted.operations > 0
    torch.testing.assert_close(found, stepped({"cut": CUT}), rtol=0, atol=0)


def layers(count):
    """Parameters of a small Llama."""
    shapes = {"norm": (8,), "q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "up": (16, 8), "down": (8, 16)}
    return {f"layers.{n}.{name}": whole(*shape) for n in range(count) for name, shape in shapes.items()}


def launches(places, monkeypatch, **options):
    weights, updates, *_ = made(places, backend="compile", **options)
    with monkeypatch.context() as patched:
        for step in range(2):
            counted = Launches()
            patched.setattr(kernels, "_compiled", counted.stand_in)
            give_gradients(weights, step)
            with counted:
                updates.apply(step)
    return counted


@pytest.mark.parametrize("state", STATES)
def test_adam_launches_one_kernel_for_each_parameter_and_some_for_all(monkeypatch, state):
    two, eight = (launches(layers(count), monkeypatch, state=state) for count in (2, 8))
    assert (two.compiled, eight.compiled) == (14, 56)
    assert two.operations == eight.operations <= 18


def test_other_optimizers_launch_one_kernel_to_round_each_parameter(monkeypatch):
    found = launches(layers(2), monkeypatch, optimizer=torch.optim.RMSprop)
    assert found.compiled == 14


def test_one_graph_serves_all_parameters_and_every_rate(monkeypatch):
    counter = CompileCounter()
    profile = replace(kernels.profile_of(torch.device("cpu")), compile_backend=counter)
    monkeypatch.setattr(kernels, "profile_of", lambda device: profile)
    torch._dynamo.reset()
    weights, updates, inner, _ = made({**layers(2), "cut": CUT}, backend="compile")
    for step in range(5):
        give_gradients(weights, step)
        for group in inner.param_groups:
            group["lr"] = 1e-3 / (step + 1)
        updates.apply(step)
        if step == 0:
            graphs = counter.frame_count
            assert graphs == 3, "one for what is whole in its rows, one where 16 divides its size, one for what is cut"
    assert counter.frame_count == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("state", "optimizer"),
    [("float32", torch.optim.AdamW), ("bfloat16", torch.optim.RMSprop), slow("bfloat16", torch.optim.Adam)],
)
def test_compiled_updates_have_integers_of_one_width(monkeypatch, state, optimizer):
    found = IntegerWidths()
    profile = replace(kernels.profile_of(HOST), compile_backend=found)
    monkeypatch.setattr(kernels, "profile_of", lambda device: profile)
    torch._dynamo.reset()
    places = {name: PLACES[name] for name in ("norm", "cut")}
    stepped(places, state=state, optimizer=optimizer, backend="compile", steps=1)
    rounded_masters(places, "compile")
    assert (found.dynamic, found.found) == (4, [])


def test_a_missing_compiler_is_said_once_and_the_rounding_is_the_same(monkeypatch, caplog):
    def broken(function, backend):
        raise RuntimeError("no g++ here\nand more")

    monkeypatch.setattr(kernels, "_compiled", broken)
    can_compile.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert [can_compile(torch.device("cpu")) for _ in range(2)] == [False, False]
    finally:
        can_compile.cache_clear()
    (said,) = caplog.messages
    assert re.search(r"operation by operation.*RuntimeError: no g\+\+ here\. Install a C\+\+ compiler", said)


def test_a_host_compiles_no_kernel():
    assert backend_on(torch.device("cpu")) == "eager"
