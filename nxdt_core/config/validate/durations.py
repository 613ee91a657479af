"""Lengths of time that are none."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.fields.duration import FORMS, seconds_of
from nxdt_core.config.secrets.messages import describe_node
from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors.configuration import ConfigProblem, WrongValue

__all__ = ["find_wrong_durations"]

_KEYS = ("checkpoint.train_time_interval", "trainer.max_time")


def find_wrong_durations(checked: Checked) -> Iterator[ConfigProblem]:
    """Yield the values that :func:`nxdt_core.config.fields.duration.seconds_of` does not read."""
    for key in _KEYS:
        value = checked.values.get(key)
        if value is None:
            continue
        try:
            seconds_of(value)
        except ValueError:
            node = checked.tree.find(key)
            assert node is not None  # it has a value
            yield WrongValue(**checked.place(key), found=describe_node(node), allowed=FORMS)
