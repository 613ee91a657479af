"""Each stage's own code with tiny shapes on this machine, and what traces say.

``--samples=all`` runs every stage; compiled they run by ``benchmarks/accelerator_day.py --small --compile``.
"""

from importlib import import_module

import pytest
import torch
from accelerator.bench import GIB, Bench
from accelerator.measurements import peers
from accelerator.measurements.watch import StepMemory
from accelerator.results import read_rows
from accelerator.runs import SHAPES, Shape
from accelerator.stages import STAGES
from accelerator.traces import trace_rows

from nxdt_core.engine.estimate.trace import LiveBytes
from nxdt_core.train import TrainSession
from nxdt_core.train.plan import plan
from tests.sampling import sampled, takes_all

DEFAULT = ("chats", "generate")
"""Each is one of another kind, and takes a second at most; pre-training has a test of its own."""
APART = frozenset({"machine", "checks"})
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


@pytest.mark.parametrize(
    ("name", "bytes_of"),
    [
        ("train-1b", {"weights": 4, "gradients": 4, "optimizer": 8}),
        # Masters count as the optimizer's; the copies in bfloat16 are what modules compute with.
        ("train-3b", {"weights": 2, "gradients": 4, "optimizer": 12}),
    ],
)
def test_the_memory_of_a_run_is_told_apart_by_what_it_is_for(bench, name, bytes_of):
    rows = run(bench, next(stage for stage in STAGES if stage.name == name))
    planned, measured = (row for row in rows if row["what"].startswith(("planned", "measured")))
    for category, size in bytes_of.items():
        assert measured[f"{category}_gib"] * GIB == pytest.approx(size * Shape().parameters, rel=0.01), category
    assert planned["weights_gib"] == pytest.approx(measured["weights_gib"], rel=0.01)
    assert rows[0]["first_step_s"] > rows[0]["warm_up_s"]


def test_the_shape_of_8b_has_as_many_parameters_as_llama_3():
    assert SHAPES["8b"].parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("vocabulary", "losses", "message"),
    [(1024, [2.0, 1.9, 1.9, 1.9, 2.1], "its loss went from 2.000 to 2.100"), (1023, [], "the shape 229,568")],
)
def test_a_peer_of_another_size_or_that_does_not_learn_is_no_measurement(bench, vocabulary, losses, message):
    model, left = torch.nn.Linear(Shape().parameters, 1, bias=False), iter(losses)
    with pytest.raises(ValueError, match=message):
        peers._measure(bench, "peer", Shape(vocabulary=vocabulary), 8, model, lambda: torch.tensor(next(left)))


def test_activations_and_workspace_are_told_apart_where_tensors_are_counted():
    overrides = ("model.num_layers=4", "model.hidden_size=128", "data.seq_length=64", "data.micro_batch_size=2")
    with TrainSession.load(
        "recipe:llama-tiny", [*overrides, "data.global_batch_size=4", "trainer.accelerator=cpu"]
    ) as session:
        batches = session.batches()
        session.step(next(batches))
        known = [parameter for _, parameter in session.model.named_parameters()]
        known += [leaf for state in session.optimizer.inner.state.values() for leaf in state.values()]
        size, batch = sum(tensor.nbytes for tensor in known), next(batches)
        with LiveBytes(known) as live:
            memory = StepMemory(
                session.model, session.optimizer, lambda: size + live.total, lambda: size + sum(live.peak.values())
            )
            session.step(batch)
        parts = memory.parts()
    planned = plan(session.config).estimate.fullest.memory
    assert parts["activations"] == pytest.approx(planned.activations, rel=0.15)
    assert parts["weights"] + parts["optimizer"] == pytest.approx(size, rel=0.01)
    total = parts.pop("total")
    assert total == pytest.approx(planned.total, rel=0.15)
    assert parts.pop("computing") == total, "the update of this optimizer needs less"
    assert sum(parts.values()) == total


def event(name, category, begin, duration):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration}


def test_a_trace_gives_rows_of_the_device_its_gaps_waits_copies_and_kernels():
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
    device, gaps, wait, copy, *kernels = trace_rows(events, steps=2)
    assert (device["ms_per_step"], device["share"]) == (0.3, 290 / 600)
    assert (gaps["times_per_step"], gaps["ms_per_step"], gaps["longest_ms"]) == (1, 0.15, 0.2)
    assert (wait["what"], wait["times_per_step"], wait["ms_per_step"]) == (
        "host waits: cudaStreamSynchronize",
        0.5,
        0.095,
    )
    assert (copy["what"], copy["share"]) == ("copies: Memcpy DtoH", 20 / 600)
    assert [(row["what"], row["times_per_step"], row["ms_per_step"]) for row in kernels] == [
        ("gemm", 1.5, 0.13),
        ("norm", 0.5, 0.01),
    ]


def test_a_trace_without_a_device_is_empty():
    device, gaps = trace_rows([event("aten::mm", "cpu_op", 0, 5)], steps=2)
    assert (device["ms_per_step"], device["share"], gaps["times_per_step"]) == (0, 0, 0)
