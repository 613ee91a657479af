"""Tests that every learning-rate schedule must pass; its author subclasses it once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.schedule_contract import ScheduleContract

    class TestMySchedule(ScheduleContract):
        @pytest.fixture
        def factory(self):
            return my_schedule

        @pytest.fixture
        def section(self):
            return MyScheduleConfig(warmup_steps=10)
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from nxdt_core.protocols.schedule import LRSchedule, ScheduleFactory, ScheduleHorizon
from nxdt_testing.contract import ComponentContract, difference, no_error

__all__ = ["ScheduleContract"]

_PAUSE_S = 0.01
"""Long enough for a clock to give another number."""


class ScheduleContract(ComponentContract):
    """The tests of a schedule: subclass it and override the fixtures ``factory`` and ``section``."""

    @pytest.fixture
    def horizon(self) -> ScheduleHorizon:
        """Return the run that the schedule is for."""
        return ScheduleHorizon(max_steps=100, lr=1e-3)

    @pytest.fixture
    def schedule(self, factory: ScheduleFactory, section: Any, horizon: ScheduleHorizon) -> LRSchedule:
        """Return the schedule of one run."""
        return factory(section, horizon)

    def test_every_step_has_a_finite_factor(self, schedule: LRSchedule, horizon: ScheduleHorizon) -> None:
        """A number, neither negative nor infinite."""
        for step in range(horizon.max_steps):
            factor = schedule(step)
            assert isinstance(factor, (int, float)), (
                f"step {step} has the factor {factor!r} of type {type(factor).__name__}; return a Python number"
            )
            assert math.isfinite(factor), f"step {step} has the factor {factor!r}, which is not finite"
            assert factor >= 0, f"step {step} has the factor {factor!r}, and a rate must not be negative"

    def test_it_gives_factors_and_not_rates(
        self, factory: ScheduleFactory, section: Any, schedule: LRSchedule, horizon: ScheduleHorizon
    ) -> None:
        """The run multiplies its peak rate with them, so that they do not grow with it."""
        doubled = factory(section, replace(horizon, lr=2 * horizon.lr))
        largest, again = (max(map(rates, range(horizon.max_steps))) for rates in (schedule, doubled))
        assert again < 1.5 * largest or again == 0, (
            f"the largest factor is {largest:g}, and {again:g} in a run of twice the rate; return a factor on the peak "
            "rate, and not the rate"
        )

    def test_steps_after_the_end_have_a_factor(self, schedule: LRSchedule, horizon: ScheduleHorizon) -> None:
        """A run may continue after ``max_steps`` of its schedule, which is a separate key."""
        for step in (horizon.max_steps, horizon.max_steps + 1, 3 * horizon.max_steps):
            with no_error(f"step {step}, after the end at {horizon.max_steps}, raises"):
                factor = schedule(step)
            assert math.isfinite(factor), f"step {step}, after the end, has the factor {factor!r}"
            assert factor >= 0, f"step {step}, after the end, has the factor {factor!r}; a rate must not be negative"

    def test_a_step_has_one_factor(self, schedule: LRSchedule, horizon: ScheduleHorizon) -> None:
        """Asked again, in another order and at another time."""
        steps = range(0, horizon.max_steps, 7)
        first = {step: schedule(step) for step in steps}
        time.sleep(_PAUSE_S)
        again = {step: schedule(step) for step in reversed(steps)}
        wrong = difference(again, first, "when it was asked before", of="factor")
        assert not wrong, f"{wrong}; compute it from the step alone: no counter, clock or random number"

    def test_a_resumed_run_has_the_factors_of_one_that_was_not_stopped(
        self, factory: ScheduleFactory, section: Any, schedule: LRSchedule, horizon: ScheduleHorizon
    ) -> None:
        """A schedule that was never asked for the first half gives the factors of the second one."""
        whole = {step: schedule(step) for step in range(horizon.max_steps)}
        second = range(horizon.max_steps // 2, horizon.max_steps)
        resumed = factory(section, horizon)
        factors = {step: resumed(step) for step in second}
        wrong = difference(
            factors, {step: whole[step] for step in second}, "in a run that was not stopped", of="factor"
        )
        assert not wrong, f"after a resume {wrong}; keep nothing between steps"

    def test_schedules_of_two_runs_share_nothing(
        self, factory: ScheduleFactory, section: Any, schedule: LRSchedule, horizon: ScheduleHorizon
    ) -> None:
        """One of another length, built later, leaves the first as it was."""
        alone = {step: schedule(step) for step in range(horizon.max_steps)}
        mine, interleaved = factory(section, horizon), {}
        other = factory(section, ScheduleHorizon(max_steps=2 * horizon.max_steps, lr=2 * horizon.lr))
        for step in alone:
            other(step)
            interleaved[step] = mine(step)
        wrong = difference(interleaved, alone, "where no second run has a schedule", of="factor")
        assert not wrong, f"{wrong}; keep options in the schedule and not in its module or class"
