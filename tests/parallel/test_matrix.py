"""Every layout trains as one process does, on real processes, and each rank holds its share and no more.

``pytest tests/parallel --matrix=full`` runs all of it (``make test-parallel``); otherwise a sample that changes daily,
whose seed the summary prints and ``--matrix=SEED`` repeats.
"""

import random
from functools import cache

import pytest
import torch

from nxdt_core.training import assemble
from tests.parallel.matrix.layouts import LAYOUTS, Layout
from tests.parallel.matrix.parity import TOLERANCES, differences, missing
from tests.parallel.matrix.shares import Shares, complaints
from tests.parallel.matrix.training import STEPS, configuration, train

CASES = [(layout, numbers) for layout in LAYOUTS for numbers in TOLERANCES]
SAMPLE = 12
ITEM_BYTES = {"float64": 8, "fp32": 4}
STATES = {"float64": 2, "fp32": 0}
"""Tensors a parameter of AdamW, and of plain gradient descent."""


def pytest_generate_tests(metafunc):
    if metafunc.function is test_a_layout_trains_as_one_process_does_and_holds_its_share:
        wanted = metafunc.config.getoption("--matrix")
        cases = CASES if wanted == "full" else random.Random(int(wanted)).sample(CASES, SAMPLE)
        metafunc.parametrize(
            ("layout", "numbers"), cases, ids=[f"{layout.name}-{numbers}" for layout, numbers in cases]
        )


@pytest.fixture(scope="module")
def reference(ranks):
    """``reference(layout, numbers)``: one process on the same model and data; run once each."""

    @cache
    def run(one, numbers):
        (report,) = ranks(1).run(train, one, numbers)
        return report

    return lambda layout, numbers: run(layout.one_process, numbers)


def shares_of(layout, reference):
    config = configuration(layout.one_process, "float64")
    shapes = {name: tuple(weight.shape) for name, weight in reference.weights.items()}
    return Shares(
        layout=layout,
        plan=assemble.model_builder(config).plan(),
        shapes=shapes,
        layers=config.selected("model").config.num_layers,
    )


def findings(layout, numbers, reports, reference):
    """All that is wrong with ``layout``: with what it computed, and with what it holds."""
    computed = [f"no rank has {name}" for name in missing(reports, reference)]
    held, shares = [], shares_of(layout, reference)
    for report in reports:
        computed += [f"rank {report.rank}: {text}" for text in differences(report, reference, TOLERANCES[numbers])]
        told = complaints(shares, report.rank, report.held, item=ITEM_BYTES[numbers], state=STATES[numbers])
        held += [f"rank {report.rank}: {text}" for text in told]
    return computed, held


def test_a_layout_trains_as_one_process_does_and_holds_its_share(ranks, reference, layout, numbers):
    reports = ranks(layout.world).run(train, layout, numbers, timeout_s=120)
    computed, held = findings(layout, numbers, reports, reference(layout, numbers))
    assert not computed + held, "\n".join([layout.name, *computed, *held])
    copies = [copy for report in reports for copy in report.tied_copies.values()]
    assert bool(copies) == layout.tied
    assert all(torch.equal(copy, copies[0]) for copy in copies)
