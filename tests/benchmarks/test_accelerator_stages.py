"""Each stage's own code with tiny shapes on this machine, and what traces say.

``--samples=all`` runs every stage; compiled they run by ``benchmarks/accelerator_day.py --small --compile``.
"""

from importlib import import_module

import pytest
import torch
from accelerator.bench import Bench
from accelerator.measurements.traces import summarise
from accelerator.results import read_rows
from accelerator.stages import STAGES

from tests.sampling import sampled, takes_all

DEFAULT = ("train-1b", "sft-4k", "generate")
"""Each is one of another kind, and takes a second at most."""
APART = frozenset({"machine", "tests"})
"""One has a test of its own; the other starts pytest, with tests that are skipped here."""


def pytest_generate_tests(metafunc):
    if "stage" in metafunc.fixturenames:
        apart = APART if takes_all(metafunc.config) else APART | {"runs"}  # eleven runs: a minute of one core
        cases = [stage for stage in STAGES if stage.name not in apart]
        default = [stage for stage in cases if stage.name in DEFAULT]
        taken = sampled(metafunc.config, cases, len(DEFAULT), default=default)
        metafunc.parametrize("stage", taken, ids=[stage.name for stage in taken])


@pytest.fixture
def bench(tmp_path):
    return Bench(rows=tmp_path / "rows.jsonl", work=tmp_path, small=True, compiles=False)


def run(bench, stage):
    module, _, function = stage.work.partition(":")
    getattr(import_module(module), function)(bench, **stage.options)
    return read_rows(bench.rows)


def test_a_stage_runs_with_tiny_shapes(bench, stage):
    rows = run(bench, stage)
    assert rows
    assert not bench.failed, rows


def test_the_machine_is_described(bench):
    rows = run(bench, STAGES[0])
    assert [row["what"] for row in rows] == ["device", "libraries", "nxdt"]
    assert rows[1]["torch"] == torch.__version__.partition("+")[0] or rows[1]["torch"] == torch.__version__
    assert "llama ok" in rows[2]["plugins"]


def event(name, category, begin, duration):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration}


def test_a_trace_is_summarised():
    events = [
        event("gemm", "kernel", 0, 100),
        event("gemm", "kernel", 90, 60),  # another stream: the device is busy until 150
        event("norm", "kernel", 160, 20),  # a gap of 10 µs does not count
        event("Memcpy DtoH", "gpu_memcpy", 280, 20),
        event("gemm", "kernel", 500, 100),
        event("cudaStreamSynchronize", "cuda_runtime", 300, 190),
        event("cudaLaunchKernel", "cuda_runtime", 490, 5),
        {"ph": "i", "name": "a mark", "ts": 0},
    ]
    found = summarise(events)
    assert (found.span_us, found.busy_us) == (600, 290)
    assert found.gaps_us == [200, 100]
    assert found.waits == {"cudaStreamSynchronize": (1, 190)}
    assert found.copies == {"Memcpy DtoH": (1, 20)}
    assert found.kernels == [("gemm", 3, 260), ("norm", 1, 20)]


def test_a_trace_without_a_device_is_empty():
    found = summarise([event("aten::mm", "cpu_op", 0, 5)])
    assert (found.span_us, found.busy_us, found.kernels) == (0, 0, [])
