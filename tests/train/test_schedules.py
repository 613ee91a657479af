"""Curves at every step against their closed forms, written here anew in absolute rates, and against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.builtins import nxdt_schedules
from nxdt_core.errors.training import ScheduleHasNoEnd
from nxdt_core.protocols.schedule import ScheduleHorizon
from nxdt_core.train import schedules

LR, END, WARM, LOW = 1e-3, 100, 10, 1e-4
HORIZON = ScheduleHorizon(max_steps=END, lr=LR)
STEPS = range(131)


def rates(schedule):
    """Learning rate by step, beyond the horizon too."""
    return [LR * schedule(step) for step in STEPS]


def warmed(after):
    """A closed form with the linear warm-up before it."""
    return [LR * (step + 1) / (WARM + 1) if step < WARM else after(step) for step in STEPS]


def line(step, start=WARM, end=END):
    """Share of ``start`` to ``end`` that is left."""
    return max(0.0, (end - step) / (end - start))


CLOSED_FORMS = {
    "LinearAnnealingWithWarmUp": (
        schedules.linear_annealing(schedules.AnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: LOW + (LR - LOW) * line(step)),
    ),
    "CosineAnnealing": (
        schedules.cosine_annealing(schedules.CosineAnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: LOW + (LR - LOW) * 0.5 * (1 + math.cos(math.pi * (min(step, END) - WARM) / (END - WARM)))),
    ),
    "CosineAnnealing, constant": (
        schedules.cosine_annealing(
            schedules.CosineAnnealingConfig(warmup_steps=WARM, min_lr=LOW, constant_steps=20), HORIZON
        ),
        warmed(lambda step: LOW + (LR - LOW) * 0.5 * (1 + math.cos(math.pi * (min(step, 80) - WARM) / (80 - WARM)))),
    ),
    "PolynomialDecayAnnealing": (
        schedules.polynomial(schedules.PolynomialConfig(warmup_steps=WARM, min_lr=LOW, power=3.0), HORIZON),
        warmed(lambda step: LOW + (LR - LOW) * line(step) ** 3),
    ),
    "PolynomialDecayAnnealing, hold": (
        schedules.polynomial(
            schedules.PolynomialConfig(warmup_steps=WARM, hold_steps=15, min_lr=LOW, power=2.0), HORIZON
        ),
        warmed(lambda step: LR if step < 25 else LOW + (LR - LOW) * line(step, start=25) ** 2),
    ),
    "SquareAnnealing": (
        schedules.square_annealing(schedules.SquareAnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: max(LOW, LR * line(step) ** 2)),
    ),
    "SquareRootAnnealing": (
        schedules.square_root_annealing(schedules.AnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: max(LOW, LR * math.sqrt(line(step, start=0)))),
    ),
    "WSD, linear": (
        schedules.warmup_stable_decay(schedules.WSDConfig(warmup_steps=WARM, min_lr=LOW, decay_steps=25), HORIZON),
        warmed(lambda step: LOW + (LR - LOW) * min(1.0, line(step, start=75))),
    ),
    "WSD, cosine": (
        schedules.warmup_stable_decay(
            schedules.WSDConfig(warmup_steps=WARM, decay_steps=50, decay_shape="cosine"), HORIZON
        ),
        warmed(lambda step: LR * math.cos(math.pi / 2 * (1 - min(1.0, line(step, start=50)))) ** 2),
    ),
    "WSD, sqrt": (
        schedules.warmup_stable_decay(schedules.WSDConfig(warmup_steps=WARM, decay_shape="sqrt"), HORIZON),
        warmed(lambda step: LR * (1 - math.sqrt(1 - min(1.0, line(step, start=90))))),
    ),
    "constant": (schedules.constant(schedules.WarmupConfig(warmup_steps=WARM), HORIZON), warmed(lambda step: LR)),
    "WarmupPolicy": (
        schedules.warmup_policy(schedules.AnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: LR if step <= END else LOW),
    ),
    "WarmupHoldPolicy": (
        schedules.warmup_hold(schedules.HoldConfig(warmup_steps=WARM, min_lr=LOW, hold_steps=30), HORIZON),
        warmed(lambda step: LR if step <= END else LOW),
    ),
    "WarmupHoldPolicy, long": (
        schedules.warmup_hold(schedules.HoldConfig(warmup_steps=WARM, min_lr=LOW, hold_steps=110), HORIZON),
        warmed(lambda step: LR if step < WARM + 110 else LOW),
    ),
    "InverseSquareRootAnnealing": (
        schedules.inverse_square_root(schedules.AnnealingConfig(warmup_steps=WARM, min_lr=LOW), HORIZON),
        warmed(lambda step: LR * math.sqrt((WARM + 1) / (step + 1)) if step <= END else LOW),
    ),
    "NoamAnnealing": (
        schedules.noam(schedules.NoamConfig(warmup_steps=WARM, d_model=64, min_lr=2e-5), HORIZON),
        [
            max(
                LR / 8 * min(max(1, step) ** -0.5, max(1, step) * WARM**-1.5),
                2e-5 if step > WARM else 0.0,
            )
            for step in STEPS
        ],
    ),
    "NoamAnnealing, cold": (
        schedules.noam(schedules.NoamConfig(d_model=16), HORIZON),
        [LR / 4 / math.sqrt(max(1, step)) for step in STEPS],
    ),
    "NoamHoldAnnealing": (
        schedules.noam_hold(schedules.NoamHoldConfig(warmup_steps=WARM, hold_steps=20, decay_rate=1.0), HORIZON),
        warmed(lambda step: LR * min(1.0, WARM / max(1, step - 20)) if step <= END else 0.0),
    ),
    "StepLR": (
        schedules.stairs(schedules.StepConfig(step_size=7, gamma=0.5), HORIZON),
        [LR * 0.5 ** math.floor(step / 7) for step in STEPS],
    ),
    "ExponentialLR": (
        schedules.exponential(schedules.ExponentialConfig(gamma=0.99), HORIZON),
        [LR * math.exp(step * math.log(0.99)) for step in STEPS],
    ),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_curve_equals_its_closed_form_at_every_step(name):
    schedule, expected = CLOSED_FORMS[name]
    assert rates(schedule) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_every_curve_has_a_closed_form_here():
    assert {record.name for record in nxdt_schedules()} == {name.partition(",")[0] for name in CLOSED_FORMS}


TORCH = torch.optim.lr_scheduler
OF_TORCH = {
    "cosine": (
        schedules.cosine_annealing(schedules.CosineAnnealingConfig(min_lr=LOW), HORIZON),
        lambda o: TORCH.CosineAnnealingLR(o, T_max=END, eta_min=LOW),
    ),
    "linear": (
        schedules.linear_annealing(schedules.AnnealingConfig(), HORIZON),
        lambda o: TORCH.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=END),
    ),
    "polynomial": (
        schedules.polynomial(schedules.PolynomialConfig(power=2.5), HORIZON),
        lambda o: TORCH.PolynomialLR(o, total_iters=END, power=2.5),
    ),
    "steps": (
        schedules.stairs(schedules.StepConfig(step_size=9, gamma=0.3), HORIZON),
        lambda o: TORCH.StepLR(o, step_size=9, gamma=0.3),
    ),
    "exponential": (
        schedules.exponential(schedules.ExponentialConfig(gamma=0.97), HORIZON),
        lambda o: TORCH.ExponentialLR(o, gamma=0.97),
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_curve_that_torch_has_equals_torch_s(name):
    schedule, make = OF_TORCH[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    for step in range(END):
        assert LR * schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15), step
        optimizer.step()
        scheduler.step()


def test_a_warm_up_longer_than_the_run_stays_a_warm_up():
    schedule = schedules.warmup_stable_decay(schedules.WSDConfig(warmup_steps=200), HORIZON)
    assert schedule(99) == pytest.approx(100 / 201)


def test_moving_the_end_changes_no_rate_before_the_decay_begins():
    """What a run may rely on that is extended while it warms up or is stable."""
    config = schedules.WSDConfig(warmup_steps=WARM, decay_steps=20)
    longer = schedules.warmup_stable_decay(config, ScheduleHorizon(max_steps=2 * END, lr=LR))
    assert rates(longer)[:80] == rates(schedules.warmup_stable_decay(config, HORIZON))[:80]


ENDING = ("LinearAnnealingWithWarmUp", "CosineAnnealing", "PolynomialDecayAnnealing", "SquareAnnealing", "WSD")


@pytest.mark.parametrize("name", ENDING)
def test_a_decay_without_an_end_is_refused(name):
    record = next(record for record in nxdt_schedules() if record.name == name)
    factory = getattr(schedules, record.target.rpartition(":")[2])
    section = getattr(schedules, record.config.rpartition(":")[2])
    with raises(ScheduleHasNoEnd, match=f"{name}(.|\n)*max_steps"):
        factory(section(), ScheduleHorizon(max_steps=0, lr=1.0))
