"""All that is wrong with a layout: with what its ranks computed, and with what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from nxdt_core.train import build
from tests.engine.matrix.expected import ExpectedShards, complaints
from tests.engine.matrix.layouts import Layout, Numbers
from tests.engine.matrix.parity import TOLERANCES, differences, missing
from tests.engine.matrix.training import Report, configuration

_ITEM_BYTES: dict[Numbers, int] = {"float64": 8, "fp32": 4}
_STATES: dict[Numbers, int] = {"float64": 2, "fp32": 0}
"""Tensors a parameter of AdamW, and of plain gradient descent."""


def computed_wrong(numbers: Numbers, reports: Sequence[Report], reference: Report) -> list[str]:
    """Where the ranks differ from one process."""
    told = [f"no rank has {name}" for name in missing(reports, reference)]
    for report in reports:
        told += [f"rank {report.rank}: {text}" for text in differences(report, reference, TOLERANCES[numbers])]
    return told


def held_in_excess(layout: Layout, numbers: Numbers, reports: Sequence[Report], reference: Report) -> list[str]:
    """What the ranks hold beyond their part in ``layout``."""
    config = configuration(layout.one_process, numbers)
    shares = ExpectedShards(
        layout=layout,
        plan=build.model_builder(config).plan(),
        shapes={name: tuple(weight.shape) for name, weight in reference.weights.items()},
        layers=len({name.split(".")[1] for name in reference.weights if name.startswith("layers.")}),
    )
    return [
        f"rank {report.rank}: {text}"
        for report in reports
        for text in complaints(shares, report.rank, report.held, item=_ITEM_BYTES[numbers], state=_STATES[numbers])
    ]
