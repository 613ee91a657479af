"""The estimate of each rank's memory against the live bytes of real ranks at their fullest moment."""

import gc
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.models import loss
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.sampling import sampled

SAMPLE = 1
WITHIN = 0.08
"""The promise is 0.15; seen was 0.005, and 0.05 above for ZeRO-3, whose gathering ahead depends on timing."""
STRATEGY = "distributed_strategy."
SIZES = (
    "model.num_layers=8",
    "model.hidden_size=768",
    "model.ffn_hidden_size=2048",
    "model.num_attention_heads=12",
    "model.num_kv_heads=4",
    "model.vocab_size=4096",
    "data.seq_length=64",
    "data.micro_batch_size=2",
    "data.global_batch_size=8",
    "data.reset_attention_mask=false",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
)
NARROW = (
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "data.seq_length=16",
)
"""Hosts are slow at bfloat16, so that little is computed over the same weights."""
SMALL = (
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1408",
    "model.num_attention_heads=8",
    "data.seq_length=32",
)
"""Of the layout that ``make test`` takes, where no shards are gathered ahead at times that vary."""
LAYOUTS = {
    "no ZeRO": (f"{STRATEGY}zero1=false",),
    "ZeRO-1": (),
    "ZeRO-2": (f"{STRATEGY}zero_stage=2",),
    "ZeRO-3": (f"{STRATEGY}zero_stage=3",),
    "tensor and sequence": (
        *SMALL,
        f"{STRATEGY}tensor_model_parallel_size=2",
        f"{STRATEGY}sequence_parallel=true",
    ),
    "context": (f"{STRATEGY}context_parallel_size=2",),
    "pipeline": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "interleaved": (
        f"{STRATEGY}pipeline_model_parallel_size=2",
        f"{STRATEGY}virtual_pipeline_model_parallel_size=2",
    ),
    "zero bubble": (f"{STRATEGY}pipeline_model_parallel_size=2", f"{STRATEGY}pipeline_schedule=zbv"),
    "masters rounded": (*NARROW, "precision.type=mixed_precisionSR"),
    "updates rounded": (*NARROW, "precision.type=bf16SR", f"{STRATEGY}zero_stage=3"),
    "state rounded": (
        *NARROW,
        "precision.type=bf16SR",
        "precision.optimizer_state=bfloat16",
        f"{STRATEGY}zero_stage=3",
    ),
}

COPIES = {"masters rounded": 2}
"""Of float32 weights that are counted with the optimizer's state."""


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


class LivePeak(TorchDispatchMode):
    """The highest sum of the sizes of all storages, looked at after each kernel: FSDP2 empties storages and keeps them,
    so that counting their births and deaths would not do."""

    def __init__(self):
        super().__init__()
        gc.collect()
        self.peak = 0
        self.storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor):
                self.note(thing)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        self.peak = max(self.peak, self.total())
        return result

    def note(self, tensor):
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)

    def total(self):
        alive = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def peak_of_a_step(overrides):
    """Bytes of this rank at the fullest moment of its second step, of its optimizer's state, and of its weights."""
    config = load("recipe:llama-tiny", overrides)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine, materialise=False)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
    optimizer = initialize_parallel_optimizer(config, engine, model)
    data = config.run.data
    count = data.global_batch_size // data.micro_batch_size // engine.rank_info.dp_size
    ids = torch.zeros(data.micro_batch_size, data.seq_length, dtype=torch.int64)
    arguments = ([Batch(input_ids=ids, labels=ids)] * count, build.objective(config), build.schedule(config))
    train_step(model, optimizer, *arguments, TrainState())
    with LivePeak() as live:
        train_step(model, optimizer, *arguments, TrainState())
    states = [value for state in optimizer.inner.state.values() for value in state.values() if value.dim()]
    weights = sum(local_of(parameter).nbytes for _, parameter in model.named_parameters())
    engine.shutdown()
    return live.peak, sum(value.nbytes for value in states), weights


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", sampled(metafunc.config, LAYOUTS, SAMPLE, default=("tensor and sequence",)))


def test_every_ranks_peak_is_what_was_planned(layout, ranks, monkeypatch):
    # As the real ranks, on the host.
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", loss._CHUNK_ELEMENTS_IN_CACHE)
    overrides = [*SIZES, *LAYOUTS[layout]]
    made = plan(load("recipe:llama-tiny", overrides))
    found = ranks(2).run(peak_of_a_step, overrides, timeout_s=300)
    for rank, (peak, state, weights) in enumerate(found):
        planned = made.estimate.ranks[rank if made.sizes.pp > 1 else 0].memory
        print(f"{layout}, rank {rank}: planned {planned.total / peak:.4f} of what was measured")
        assert planned.total == pytest.approx(peak, rel=WITHIN)
        assert planned.optimizer == pytest.approx(state + COPIES.get(layout, 0) * weights, rel=0.01)
