"""Curves against their closed forms and against torch's own schedulers."""

import math

import pytest
import torch

from nxdt_core.builtins import lr_schedulers as lrs
from nxdt_core.errors import ScheduleHasNoEnd
from nxdt_core.protocols.lr_scheduler import ScheduleHorizon

HORIZON = ScheduleHorizon(max_steps=100, lr=1e-3)


def torch_curve(make, steps):
    """Factors that a torch scheduler applies at optimizer steps 0 … steps-1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def test_cosine_equals_torch_cosine_annealing():
    schedule = lrs.cosine_annealing(lrs.CosineAnnealingConfig(min_lr=1e-4), HORIZON)
    expected = torch_curve(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=100, eta_min=0.1), 100)
    assert [schedule(step) for step in range(100)] == pytest.approx(expected, abs=1e-12)


def test_linear_equals_torch_linear():
    schedule = lrs.linear_annealing(lrs.LinearAnnealingConfig(), HORIZON)
    make = lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=100)  # noqa: E731
    assert [schedule(step) for step in range(100)] == pytest.approx(torch_curve(make, 100), abs=1e-12)


@pytest.mark.parametrize(
    ("factory", "config"),
    [
        (lrs.constant, lrs.ConstantConfig(warmup_steps=9)),
        (lrs.linear_annealing, lrs.LinearAnnealingConfig(warmup_steps=9)),
        (lrs.cosine_annealing, lrs.CosineAnnealingConfig(warmup_steps=9)),
        (lrs.warmup_stable_decay, lrs.WSDConfig(warmup_steps=9)),
    ],
)
def test_warm_up_is_linear_and_ends_at_the_full_rate(factory, config):
    schedule = factory(config, HORIZON)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_holds_min_lr_for_its_constant_steps_and_beyond():
    schedule = lrs.cosine_annealing(lrs.CosineAnnealingConfig(min_lr=2e-4, constant_steps=20), HORIZON)
    assert schedule(79) > 0.2
    assert [schedule(step) for step in (80, 99, 100, 10_000)] == pytest.approx([0.2] * 4)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_is_stable_then_decays_over_its_last_steps(shape):
    schedule = lrs.warmup_stable_decay(lrs.WSDConfig(decay_steps=25, decay_shape=shape, min_lr=1e-4), HORIZON)
    assert {schedule(step) for step in range(75)} == {1.0}
    half = {"linear": 0.5, "cosine": 0.5, "sqrt": 1 - math.sqrt(0.5)}[shape]
    assert schedule(75) == pytest.approx(1.0)
    middle = lrs.warmup_stable_decay(lrs.WSDConfig(decay_steps=50, decay_shape=shape), HORIZON)
    assert middle(75) == pytest.approx(half)
    assert schedule(100) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_stays_a_warm_up():
    schedule = lrs.warmup_stable_decay(lrs.WSDConfig(warmup_steps=200), HORIZON)
    assert schedule(99) == pytest.approx(100 / 201)


@pytest.mark.parametrize("factory", [lrs.cosine_annealing, lrs.linear_annealing, lrs.warmup_stable_decay])
def test_a_decay_without_an_end_is_refused(factory):
    config = {"cosine_annealing": lrs.CosineAnnealingConfig, "linear_annealing": lrs.LinearAnnealingConfig}
    with pytest.raises(ScheduleHasNoEnd, match="NXDT-T001"):
        factory(config.get(factory.__name__, lrs.WSDConfig)(), ScheduleHorizon(max_steps=0, lr=1.0))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (lrs.ConstantConfig(warmup_steps=-1), "warmup_steps"),
        (lrs.LinearAnnealingConfig(min_lr=-1e-9), "min_lr"),
        (lrs.CosineAnnealingConfig(constant_steps=-1), "constant_steps"),
        (lrs.WSDConfig(decay_steps=0), "decay_steps"),
    ],
)
def test_values_that_cannot_work_are_named(config, key):
    assert [found for found, _ in config.check()] == [key]
