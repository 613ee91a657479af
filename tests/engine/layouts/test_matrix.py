"""Every layout trains as one process does, on real processes, and each rank holds its share and no more.

``make test-parallel`` runs all of it, ``make test`` a sample (``--samples``, tests/sampling.py).
"""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.engine.matrix.judgement import computed_wrong, held_in_excess
from tests.engine.matrix.layouts import LAYOUTS
from tests.engine.matrix.parity import TOLERANCES
from tests.engine.matrix.training import STEPS, own_model, train
from tests.sampling import sampled

CASES = [(layout, numbers) for layout in LAYOUTS for numbers in TOLERANCES]
SAMPLE = 4
EACH_DIMENSION = {
    "dp2-zero3": "fp32",
    "tp2-sp.packed": "float64",
    "pp2-vpp2.tied": "float64",
    "cp2-gather.packed": "fp32",
    "dp2-zero1.ep2.moe": "float64",
}
"""What ``make test`` takes, all on two ranks; combinations of them need ``--samples`` with another seed."""


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        default = [case for case in CASES if (case[0].name, case[1]) in EACH_DIMENSION.items()]
        cases = sampled(metafunc.config, CASES, SAMPLE, default=default)
        metafunc.parametrize(
            ("layout", "numbers"), cases, ids=[f"{layout.name}-{numbers}" for layout, numbers in cases]
        )


def test_layouts_differ_in_name():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_a_layout_trains_as_one_process_does_and_holds_its_share(ranks, alone, steps, layout, numbers):
    if layout.needs_newer_torch and not hasattr(DeviceMesh, "_unflatten"):
        pytest.skip("torch 2.9 cannot run it, and `nxdt config check` refuses it there")
    model = own_model(layout, layout.least_layers)
    reports = ranks(layout.world).run(train, layout, numbers, steps(STEPS), model, timeout_s=180)
    reference = alone(layout, numbers, steps(STEPS), model)
    wrong = computed_wrong(numbers, reports, reference) + held_in_excess(layout, numbers, reports, reference)
    assert not wrong, "\n".join([layout.name, *wrong])
    copies = [copy for report in reports for copy in report.tied_copies.values()]
    assert bool(copies) == layout.tied
    assert all(torch.equal(copy, copies[0]) for copy in copies)
