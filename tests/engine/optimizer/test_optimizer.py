"""Decay rules, global gradient norm, and optimizer state under global names."""

import math

import pytest
import torch
from nxdt_testing.errors import raises
from torch import nn

from nxdt_core.config import load
from nxdt_core.distributed.devices import HOST, current_device
from nxdt_core.engine.data.gradients import global_norm
from nxdt_core.engine.optim.optimizer import TorchOptimizer
from nxdt_core.engine.parameters import parameter_groups
from nxdt_core.errors.training import OptimizerStateDoesNotFit, OptimizerStateNotTensor
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.train import build
from nxdt_core.train.optimizers.config import AdamWConfig
from nxdt_core.train.optimizers.elementwise import adamw
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer

PLAN = ParallelPlan(norms=("norm.weight", "layers.*.norm.weight"), no_weight_decay=("*.bias",))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4)})})


def groups_of(net, *, decay_norms, weight_decay=0.25, lr=0.1):
    return parameter_groups(net.named_parameters(), PLAN, lr=lr, weight_decay=weight_decay, decay_norms=decay_norms)


def optimizer_over(groups, build, **options):
    """One process's optimizer, with the engine's norm."""
    parameters = [parameter for group in groups for parameter in group["params"]]

    def norm():
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        return global_norm([p.grad for p in parameters], None, device=parameters[0].device, dtype=dtype)

    return TorchOptimizer(build, groups, norm, **options)


def decay_by_name(groups):
    return {name: group["weight_decay"] for group in groups for name in group["names"]}


@pytest.mark.parametrize(("decay_norms", "norm_decay"), [(False, 0.0), (True, 0.25)])
def test_norms_decay_only_when_told_and_biases_never(decay_norms, norm_decay):
    assert decay_by_name(groups_of(Net(), decay_norms=decay_norms)) == {
        "layers.0.linear.weight": 0.25,
        "norm.weight": norm_decay,
        "layers.0.norm.weight": norm_decay,
        "norm.bias": 0.0,
        "layers.0.norm.bias": 0.0,
        "layers.0.linear.bias": 0.0,
    }


def test_the_configured_decay_reaches_the_weights():
    net = Net()
    groups = groups_of(net, decay_norms=False, weight_decay=0.5, lr=0.1)
    optimizer = optimizer_over(groups, lambda shards: adamw(shards, AdamWConfig(lr=0.1, weight_decay=0.5)))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)  # no gradient: what changes is decay alone
    optimizer.step()
    for name, p in net.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "layers.0.linear.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_frozen_parameters_are_in_no_group():
    net = Net()
    net.norm.weight.requires_grad_(False)
    assert "norm.weight" not in decay_by_name(groups_of(net, decay_norms=True))


def give_gradients(*nets):
    """The same ones to all, other ones each time."""
    for same in zip(*(net.parameters() for net in nets), strict=True):
        gradient = torch.randn_like(same[0])
        for parameter in same:
            parameter.grad = gradient.clone()


def optimizer_with_gradients(scale=1.0):
    torch.manual_seed(0)
    net = Net()
    groups = groups_of(net, decay_norms=False)
    optimizer = optimizer_over(groups, lambda shards: adamw(shards, AdamWConfig(lr=0.1, weight_decay=0.25)))
    for p in net.parameters():
        p.grad = scale * torch.randn_like(p)
    return net, optimizer


STOCK = {
    "fused": (torch.float32, lambda shards: torch.optim.AdamW(shards, lr=0.1, weight_decay=0.0, fused=True)),
    "fused, float64": (torch.float64, lambda shards: torch.optim.AdamW(shards, lr=0.1, weight_decay=0.0, fused=True)),
    "unfused": (torch.float32, lambda shards: torch.optim.AdamW(shards, lr=0.1, weight_decay=0.0, fused=False)),
    "SGD": (torch.float32, lambda shards: torch.optim.SGD(shards, lr=0.1, momentum=0.9, fused=True)),
}


@pytest.fixture
def as_written(monkeypatch):
    """Lets kernels run that would be compiled, and counts their calls."""
    calls = []

    def called(function, backend):
        return lambda *arguments: calls.append(function(*arguments))

    monkeypatch.setattr("nxdt_core.engine.optim.updates._compiled", called)
    return calls


@pytest.mark.parametrize("backend", ["eager", "compile"])
@pytest.mark.parametrize("stock", STOCK)
def test_clipped_steps_are_those_of_torchs_clipping(stock, backend, as_written):
    """What clipped a step says nothing of the next, which is not clipped, and of gradients that are dropped.

    Where kernels are compiled, the fused Adam is one, and leaves the gradients as they are.
    """
    dtype, build = STOCK[stock]
    net, other = Net().to(dtype), Net().to(dtype)
    other.load_state_dict(net.state_dict())
    mine = optimizer_over(groups_of(net, decay_norms=True, weight_decay=0.0), build, backend=backend)
    theirs = build([*other.parameters()])
    give_gradients(net)
    mine.clip_grad_norm(1e-3)
    for max_norm in (None, 0.5, 1e6, None, 0.05):
        give_gradients(net, other)
        norm = mine.clip_grad_norm(max_norm)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm or math.inf))
        mine.step()
        theirs.step()
    give_gradients(net, other)
    mine.step()
    theirs.step()
    assert bool(as_written) == (backend == "compile" and stock == "fused")
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance, msg=f"{name}: {{}}".format)
        assert mine.inner.state[p].keys() == theirs.state[q].keys() != set()
        for leaf, value in theirs.state[q].items():
            torch.testing.assert_close(mine.inner.state[p][leaf], value, **tolerance, msg=f"{leaf}: {{}}".format)


def test_what_rejected_a_step_is_gone_after_it():
    net, optimizer = optimizer_with_gradients()
    optimizer.inner.found_inf = torch.tensor(1.0)  # as the engine sets it where the host does not decide
    before = net.norm.weight.detach().clone()
    optimizer.step()
    assert torch.equal(net.norm.weight.detach(), before)
    give_gradients(net)
    optimizer.step()
    assert not torch.equal(net.norm.weight.detach(), before)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_compiled_step_rounds_bfloat16_and_keeps_state_as_torchs_fused_kernels(kind, as_written):
    net, other = Net().bfloat16(), Net().bfloat16()
    other.load_state_dict(net.state_dict())

    def build(shards):
        return kind(shards, fused=True, betas=(0.5, 0.5))

    mine, theirs = (
        optimizer_over(groups_of(each, decay_norms=True), build, backend=backend)
        for each, backend in ((net, "compile"), (other, "eager"))
    )
    give_gradients(net, other)
    mine.step()
    theirs.step()
    assert len(as_written) == len([*net.parameters()])
    state, expected = mine.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    found = {**dict(net.named_parameters()), **state}
    torch.testing.assert_close(found, {**dict(other.named_parameters()), **expected}, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "device", [pytest.param(HOST, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.accelerator)], ids=str
)
def test_compiled_steps_are_those_of_torchs_fused_kernels(device):
    device, draw = device or current_device(), torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=draw) for size in ((300, 401), (512,), (160, 96), (1,))]
    mine, theirs = ([nn.Parameter(value.to(device, copy=True)) for value in values] for _ in range(2))
    group = {"params": mine, "names": list("abcd"), "lr": 1e-2, "weight_decay": 0.1}
    ours = optimizer_over([group], lambda shards: torch.optim.AdamW(shards, fused=True), backend="compile")
    stock = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw).to(device)
            other.grad = one.grad.clone()
        norm = ours.clip_grad_norm(1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        ours.reject_unless_finite(torch.ones((), device=device), norm)
        ours.step()
        stock.step()
    torch.testing.assert_close([*mine], [*theirs], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_runs_that_compile_step_adam_in_compiled_kernels_on_devices(compiled, as_written, monkeypatch):
    monkeypatch.setattr("nxdt_core.engine.engine.backend_on", lambda device: "compile")
    config = load("recipe:llama-tiny", [f"model.compile={str(compiled).lower()}", "model.num_layers=1"])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    for _, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(as_written) == compiled * len([*model.named_parameters()])


def test_fused_kernels_clip_without_a_pass_over_the_gradients():
    net, optimizer = optimizer_with_gradients()
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    optimizer.clip_grad_norm(0.5)
    assert all(torch.equal(p.grad, before[name]) for name, p in net.named_parameters())


def test_state_goes_out_and_comes_back_under_global_names():
    net, optimizer = optimizer_with_gradients()
    optimizer.step()
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    assert "layers.0.linear.weight/exp_avg" in state
    other_net, other = optimizer_with_gradients(scale=3.0)
    other_net.load_state_dict(net.state_dict())
    other.load_state_dict(state)
    for mine, theirs in ((net, optimizer), (other_net, other)):
        torch.manual_seed(5)
        for p in mine.parameters():
            p.grad = torch.randn_like(p)
        theirs.step()
    for (name, a), (_, b) in zip(net.named_parameters(), other_net.named_parameters(), strict=True):
        assert torch.equal(a, b), name


class Counting(torch.optim.SGD):
    """Keeps plain numbers, as simple third-party optimizers do."""

    extra: object = 3

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": self.state[p].get("step", 0) + 1, "extra": self.extra}


def test_plain_numbers_come_back_as_what_they_were():
    net = Net()
    groups = groups_of(net, decay_norms=False)
    optimizer = optimizer_over(groups, lambda shards: Counting(shards, lr=0.1))
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.inner.state[net.norm.weight] == {"step": 1, "extra": 3}
    assert type(optimizer.inner.state[net.norm.weight]["step"]) is int


def test_state_that_no_checkpoint_can_hold_is_refused_with_its_name():
    net = Net()
    groups = groups_of(net, decay_norms=False)
    optimizer = optimizer_over(groups, lambda shards: Counting(shards, lr=0.1))
    optimizer.inner.extra = {"a": 1}
    optimizer.step()
    with raises(OptimizerStateNotTensor, match="'extra'"):
        optimizer.state_dict()


def test_state_of_unknown_parameters_is_refused():
    _, optimizer = optimizer_with_gradients()
    with raises(OptimizerStateDoesNotFit, match="elsewhere"):
        optimizer.load_state_dict({"elsewhere/exp_avg": torch.zeros(1)})


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fused", [True, False])
def test_figures_that_are_not_finite_never_reach_weights_or_state(broken, fused):
    net = Net()
    groups = groups_of(net, decay_norms=False)
    optimizer = optimizer_over(groups, lambda shards: adamw(shards, AdamWConfig(lr=0.1, fused=fused)))
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.reject_unless_finite(torch.tensor(1.0), optimizer.clip_grad_norm(1.0))
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    for loss, grad in ((1.0, broken), (broken, 0.5)):
        for p in net.parameters():
            p.grad = torch.full_like(p, grad)
        optimizer.reject_unless_finite(torch.tensor(loss), optimizer.clip_grad_norm(None))
        optimizer.step()
        assert all(p.grad is None for p in net.parameters())
    assert int(optimizer.skipped_steps) == 2
    for name, p in net.named_parameters():
        assert torch.equal(p.detach(), weights[name])
    for name, value in optimizer.state_dict().items():
        assert torch.equal(value, state[name]), name
