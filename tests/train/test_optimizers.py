"""Every built-in optimizer against torch's own or a loop over numbers: its steps, its decay, its state, bad figures."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn

from nxdt_core.builtins import nxdt_optimizers
from nxdt_core.engine.data.gradients import global_norm
from nxdt_core.engine.optim.optimizer import TorchOptimizer
from nxdt_core.engine.parameters import parameter_groups
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.tensor_shards import TensorSlice
from nxdt_core.train.optimizers import config as sections
from nxdt_core.train.optimizers.elementwise import Lion, adamw_fp32_state
from nxdt_core.train.optimizers.whole_parameters import Muon, Novograd, orthogonal

STEPS = 6
SHAPES = {"matrix": (6, 10), "tall": (9, 4), "vector": (7,), "stack": (3, 5, 4), "row": (1, 8)}
RECORDS = {record.name: record for record in nxdt_optimizers()}


def weights(dtype=torch.float64, names=tuple(SHAPES)):
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(SHAPES[name], generator=draw, dtype=dtype)) for name in names}


def gradients(parameters, step, scale=1.0):
    draw = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)).to(parameter.dtype)


def one_group(parameters, section):
    return [
        {
            "params": list(parameters.values()),
            "names": list(parameters),
            "lr": section.lr,
            "weight_decay": section.weight_decay,
        }
    ]


def run(parameters, optimizer, steps=STEPS):
    for step in range(steps):
        gradients(parameters.values(), step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def made(name, parameters, **keys):
    """A built-in optimizer by its record, over one group."""
    record = RECORDS[name]
    module, _, target = record.target.partition(":")
    section = getattr(sections, record.config.rpartition(":")[2])(**{"lr": 0.01, **keys})
    return getattr(importlib.import_module(module), target)(one_group(parameters, section), section)


OF_TORCH = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
    "adamw_fp32OptState": (torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-6}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adadelta": (torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-5}),
    "adamax": (torch.optim.Adamax, {"betas": (0.8, 0.9), "eps": 1e-6}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-8}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-6, "momentum": 0.3, "centered": True}),
    "rprop": (torch.optim.Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0)}),
    "adafactor": (torch.optim.Adafactor, {"beta2_decay": -0.7, "eps": (1e-7, 1e-2), "d": 1.05}),
}
"""Other keys than the defaults, so that one that is not handed on shows."""


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_has_steps_as_torch_s(name):
    theirs, keys = OF_TORCH[name]
    decay = {} if name == "rprop" else {"weight_decay": 0.1}
    names = [name for name in SHAPES if name != "row"]  # Adafactor keeps a row as it is, torch's factors it
    mine, other = weights(names=names), weights(names=names)
    found = run(mine, made(name, mine, **keys, **decay))
    expected = run(other, theirs(other.values(), lr=0.01, **keys, **decay))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_steps_as_torch_s_on_matrices_and_as_adamw_on_the_rest(adjust, nesterov):
    names = ("matrix", "tall", "vector")
    mine, other = weights(torch.float32, names), weights(torch.float32, names)
    keys = {"weight_decay": 0.1, "nesterov": nesterov}
    muon = made("muon", mine, adjust_lr=adjust, ns_dtype="bfloat16", eps=1e-6, **keys)
    theirs = torch.optim.Muon([other["matrix"], other["tall"]], lr=0.01, adjust_lr_fn=adjust, **keys)
    adamw = torch.optim.AdamW([other["vector"]], lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(STEPS):
        gradients(mine.values(), step)
        gradients(other.values(), step)
        for optimizer in (muon, theirs, adamw):
            optimizer.step()
    for name, parameter in other.items():
        torch.testing.assert_close(mine[name], parameter, rtol=0, atol=1e-7)


def test_orthogonal_brings_all_singular_values_near_one_in_every_matrix_of_a_stack():
    stack = torch.randn(4, 12, 7, generator=torch.Generator().manual_seed(3))
    found = orthogonal(stack, 5)
    assert found.shape == stack.shape
    assert ((torch.linalg.svdvals(found) > 0.5) & (torch.linalg.svdvals(found) < 1.5)).all()
    for one, of_stack in zip(stack, found, strict=True):
        torch.testing.assert_close(orthogonal(one, 5), of_stack)
        u, _, v = torch.linalg.svd(one, full_matrices=False)
        assert ((u @ v) * of_stack).sum() / of_stack.norm() / math.sqrt(7) > 0.97  # of one direction


def test_muon_leaves_tables_and_named_matrices_to_adamw():
    parameters = weights(names=("matrix", "tall"))
    section = sections.MuonConfig(lr=0.01, adamw_params=("matrix",))
    groups = one_group(parameters, section)
    shape = SHAPES["tall"]
    for shards, expected in (
        (None, {"matrix": {"exp_avg", "exp_avg_sq", "step"}, "tall": {"momentum_buffer"}}),
        (False, {name: {"exp_avg", "exp_avg_sq", "step"} for name in parameters}),
    ):
        if shards is not None:
            groups[0]["shards"] = [
                ParameterShard(shape=shape, region=TensorSlice.whole(shape), matrix=shards)
                for shape in (SHAPES["matrix"], shape)
            ]
        optimizer = Muon(groups, section)
        run(parameters, optimizer, 1)
        assert {name: set(optimizer.state[p]) for name, p in parameters.items()} == expected


def test_lion_is_the_sign_of_an_interpolation():
    parameters = weights(names=("vector",))
    section = sections.LionConfig(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95))
    values, mean = parameters["vector"].tolist(), [0.0] * 7
    optimizer = Lion(one_group(parameters, section), section)
    for step in range(STEPS):
        gradients(parameters.values(), step)
        grads = parameters["vector"].grad.tolist()
        optimizer.step()
        for i, (value, grad) in enumerate(zip(values, grads, strict=True)):
            values[i] = value * (1 - 0.01 * 0.1) - 0.01 * math.copysign(1.0, 0.8 * mean[i] + 0.2 * grad)
            mean[i] = 0.95 * mean[i] + 0.05 * grad
    assert parameters["vector"].tolist() == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("averaging", [True, False])
def test_novograd_divides_by_one_running_norm(averaging):
    parameters = weights(names=("vector",))
    section = sections.NovogradConfig(lr=0.01, weight_decay=0.1, grad_averaging=averaging)
    values, mean, square = parameters["vector"].tolist(), [0.0] * 7, None
    optimizer = Novograd(one_group(parameters, section), section)
    for step in range(STEPS):
        gradients(parameters.values(), step)
        grads = parameters["vector"].grad.tolist()
        optimizer.step()
        norm = sum(grad * grad for grad in grads)
        square = norm if square is None else 0.98 * square + 0.02 * norm
        for i, grad in enumerate(grads):
            update = grad / (math.sqrt(square) + 1e-8) + 0.1 * values[i]
            mean[i] = 0.95 * mean[i] + (0.05 if averaging else 1.0) * update
            values[i] -= 0.01 * mean[i]
    assert parameters["vector"].tolist() == pytest.approx(values, rel=1e-12)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_all_of_what_is_none():
    parameters = weights()
    optimizer = made("adafactor", parameters)
    run(parameters, optimizer, 1)
    sizes = {
        name: {key: tuple(value.shape) for key, value in optimizer.state[p].items() if key != "step"}
        for name, p in parameters.items()
    }
    assert sizes == {
        "matrix": {"row_var": (6,), "col_var": (10,)},
        "tall": {"row_var": (9,), "col_var": (4,)},
        "stack": {"row_var": (3, 5), "col_var": (3, 4)},
        "vector": {"variance": (7,)},
        "row": {"variance": (1, 8)},
    }


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "rprop"])
def test_a_gradient_of_zeros_is_a_small_step_and_no_nan(name):
    parameters = weights()
    start = {key: p.detach().clone() for key, p in parameters.items()}
    optimizer = made(name, parameters)
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(dict(parameters), start, rtol=1e-2, atol=0)


class TestFloat32StateOfBfloat16:
    """``adamw_fp32OptState`` where the parameters are bfloat16."""

    def test_one_step_is_that_of_float32_rounded_once(self):
        coarse = weights(torch.bfloat16)
        fine = {name: nn.Parameter(p.detach().float()) for name, p in coarse.items()}
        section = sections.AdamWConfig(lr=0.05, weight_decay=0.1)
        found = run(coarse, adamw_fp32_state(one_group(coarse, section), section), 1)
        for p, q in zip(coarse.values(), fine.values(), strict=True):
            q.grad = p.grad.float()
        reference = torch.optim.AdamW(fine.values(), lr=0.05, weight_decay=0.1)
        reference.step()
        for name, value in fine.items():
            assert torch.equal(found[name], value.detach().bfloat16())

    def test_state_is_float32_and_keeps_squares_that_bfloat16_would_not_move(self):
        parameters = weights(torch.bfloat16)
        section = sections.AdamWConfig(lr=1e-3)
        optimizer = adamw_fp32_state(one_group(parameters, section), section)
        for _ in range(50):
            for p in parameters.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        for p in parameters.values():
            state = optimizer.state[p]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
            torch.testing.assert_close(state["exp_avg_sq"], torch.full(p.shape, 1 - 0.999**50))
        stock = torch.optim.AdamW([nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], lr=1e-3)
        for _ in range(50):
            stock.param_groups[0]["params"][0].grad = torch.ones(4, dtype=torch.bfloat16)
            stock.step()
        (lost,) = stock.state.values()
        assert abs(float(lost["exp_avg_sq"][0]) / (1 - 0.999**50) - 1) > 0.005

    def test_buckets_change_nothing(self, monkeypatch):
        section = sections.AdamWConfig(lr=0.05)
        whole, cut = weights(torch.bfloat16), weights(torch.bfloat16)
        expected = run(whole, adamw_fp32_state(one_group(whole, section), section))
        monkeypatch.setattr("nxdt_core.train.optimizers.elementwise.BUCKET_ELEMENTS", 40)
        found = run(cut, adamw_fp32_state(one_group(cut, section), section))
        assert all(torch.equal(found[name], value) for name, value in expected.items())


PLAN = ParallelPlan()


def over(parameters, name, plan=PLAN, **keys):
    """As the engine builds it: groups by the plan's rules, then the optimizer over them."""
    decay = keys.pop("weight_decay", 0.0)
    groups = parameter_groups(parameters.items(), plan, lr=0.01, weight_decay=decay, decay_norms=False)
    record = RECORDS[name]
    module, _, target = record.target.partition(":")
    section = getattr(sections, record.config.rpartition(":")[2])(lr=0.01, **keys)
    factory = getattr(importlib.import_module(module), target)

    def norm():
        return global_norm([p.grad for p in parameters.values()], None, device=torch.device("cpu"), dtype=torch.float32)

    return TorchOptimizer(lambda shards: factory(shards, section), groups, norm)


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "rprop"])
def test_the_decay_of_the_groups_is_the_one_that_counts(name):
    """NxD Training wrote 0.01 into its groups, whatever ``weight_decay`` was."""
    plan = ParallelPlan(no_weight_decay=("vector",))
    found = {}
    for decay in (0.0, 0.3, 0.6):
        parameters = weights()
        found[decay] = run(parameters, over(parameters, name, plan, weight_decay=decay))
    for key in SHAPES:
        same = [torch.equal(found[0.0][key], found[decay][key]) for decay in (0.3, 0.6)]
        assert same == [key == "vector"] * 2, key
    if name not in ("adam", "adadelta", "adamax", "adagrad", "rmsprop"):  # these scale what the decay adds
        sizes = [found[decay]["matrix"].norm() for decay in (0.0, 0.3, 0.6)]
        assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("name", RECORDS)
def test_state_is_tensors_and_a_loaded_one_goes_on_to_the_bit(name):
    dtype = torch.bfloat16 if name == "adamw_fp32OptState" else torch.float32
    parameters = weights(dtype)
    optimizer = over(parameters, name)
    run(parameters, optimizer, 3)
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    assert all(type(value) is torch.Tensor for value in state.values())
    assert bool(state) == (name != "sgd")
    copies = {key: nn.Parameter(p.detach().clone()) for key, p in parameters.items()}
    other = over(copies, name)
    other.load_state_dict(state)
    for step in (3, 4):
        for mine in (parameters, copies):
            gradients(mine.values(), step)
        optimizer.step()
        other.step()
    assert all(torch.equal(p, copies[key]) for key, p in parameters.items())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", RECORDS)
def test_a_step_that_is_not_finite_leaves_no_trace(name, broken):
    parameters = weights(torch.float32)
    optimizer = over(parameters, name)
    run(parameters, optimizer, 2)
    before = {key: p.detach().clone() for key, p in parameters.items()}
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    gradients(parameters.values(), 2)
    parameters["matrix"].grad[0, 0] = broken
    optimizer.reject_unless_finite(torch.tensor(1.0), optimizer.clip_grad_norm(None))
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    assert all(torch.equal(p.detach(), before[key]) for key, p in parameters.items())
    after = optimizer.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in after.items())


@pytest.mark.parametrize("name", RECORDS)
def test_each_group_has_its_own_rate_and_the_schedule_scales_all(name):
    slow, fast = weights(names=("matrix",)), weights(names=("matrix",))
    for parameters, factor in ((slow, 0.0), (fast, 1.0)):
        optimizer = over(parameters, name)
        optimizer.set_lr_factor(factor)
        run(parameters, optimizer, 2)
    start = weights(names=("matrix",))["matrix"].detach()
    assert not torch.equal(fast["matrix"].detach(), start)
    if name != "rprop":  # whose first step alone has the rate
        assert torch.equal(slow["matrix"].detach(), start)
