"""The one deadline of a save: what counts against it and what does not. The clock is the test's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nxdt_plugin_s3 import connection
from nxdt_plugin_s3.connection import RetryBudget


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def fail_for(budget, clock, seconds, group="step-1"):
    budget.begin(group, clock.now)
    clock.now += seconds
    budget.end(group)


def left_s(budget, clock, group="step-1"):
    budget.begin(group, clock.now)
    left = budget.left_s(group)
    budget.end(group)
    return left


def test_spells_of_trouble_add_up_and_the_time_between_them_is_free(clock):
    budget = RetryBudget(100)
    fail_for(budget, clock, 30)
    clock.now += 50
    fail_for(budget, clock, 20)
    assert left_s(budget, clock) == 50


def test_requests_that_fail_together_count_once(clock):
    budget = RetryBudget(100)
    assert budget.begin("step-1", clock.now) is True
    clock.now += 10
    assert budget.begin("step-1", clock.now) is False
    clock.now += 10
    budget.end("step-1")
    clock.now += 10
    assert budget.left_s("step-1") == 70
    budget.end("step-1")
    assert left_s(budget, clock) == 70


def test_the_first_attempt_counts_from_its_sending(clock):
    """A request that is met by silence has cost its timeout when it fails."""
    budget = RetryBudget(100)
    budget.begin("step-1", clock.now - 60)
    assert budget.left_s("step-1") == 40


def test_another_save_has_its_own(clock):
    budget = RetryBudget(100)
    fail_for(budget, clock, 99)
    assert left_s(budget, clock, "step-2") == 100


def test_after_a_quiet_time_a_step_that_is_read_or_saved_again_starts_anew(clock):
    budget = RetryBudget(100)
    fail_for(budget, clock, 99)
    clock.now += 100
    assert left_s(budget, clock) == 1
    clock.now += 101
    assert left_s(budget, clock) == 100
