"""The one deadline of a save: what counts against it and what does not. The clock is the test's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nxdt_plugin_s3 import patience
from nxdt_plugin_s3.patience import HeldUp


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def fail_for(held_up, clock, seconds, group="step-1"):
    held_up.begin(group, clock.now)
    clock.now += seconds
    held_up.end(group)


def left_s(held_up, clock, group="step-1"):
    held_up.begin(group, clock.now)
    left = held_up.left_s(group)
    held_up.end(group)
    return left


def test_spells_of_trouble_add_up_and_the_time_between_them_is_free(clock):
    held_up = HeldUp(100)
    fail_for(held_up, clock, 30)
    clock.now += 50
    fail_for(held_up, clock, 20)
    assert left_s(held_up, clock) == 50


def test_requests_that_fail_together_count_once(clock):
    held_up = HeldUp(100)
    assert held_up.begin("step-1", clock.now) is True
    clock.now += 10
    assert held_up.begin("step-1", clock.now) is False
    clock.now += 10
    held_up.end("step-1")
    clock.now += 10
    assert held_up.left_s("step-1") == 70
    held_up.end("step-1")
    assert left_s(held_up, clock) == 70


def test_the_first_attempt_counts_from_its_sending(clock):
    """A request that is met by silence has cost its timeout when it fails."""
    held_up = HeldUp(100)
    held_up.begin("step-1", clock.now - 60)
    assert held_up.left_s("step-1") == 40


def test_another_save_has_its_own(clock):
    held_up = HeldUp(100)
    fail_for(held_up, clock, 99)
    assert left_s(held_up, clock, "step-2") == 100


def test_after_a_quiet_time_a_step_that_is_read_or_saved_again_starts_anew(clock):
    held_up = HeldUp(100)
    fail_for(held_up, clock, 99)
    clock.now += 100
    assert left_s(held_up, clock) == 1
    clock.now += 101
    assert left_s(held_up, clock) == 100
