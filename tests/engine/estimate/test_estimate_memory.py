"""The estimate of memory against live bytes of a real model of 53M parameters, part by part, within 15 %."""

import dataclasses
import gc

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from nxdt_core.config import load
from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.estimate.trace import LiveBytes
from nxdt_core.models import loss
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

WITHIN = 0.15
SIZES = (
    "model.num_layers=8",
    "model.hidden_size=768",
    "model.ffn_hidden_size=2048",
    "model.num_attention_heads=12",
    "model.num_kv_heads=4",
    "model.vocab_size=4096",
    "data.seq_length=64",
    "data.micro_batch_size=2",
    "data.reset_attention_mask=false",
    "trainer.accelerator=cpu",
)

NARROW = ("model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.num_attention_heads=4")
"""Most of a micro-batch's memory is that of logits."""


def config_of(*overrides):
    return load("recipe:llama-tiny", [*SIZES, *overrides])


@pytest.fixture
def hosts_loss(monkeypatch):
    """The real run's loss works in chunks of the host's cache; let that of the meta device do the same."""
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", loss._CHUNK_ELEMENTS_IN_CACHE)


class Run:
    """A real run of a configuration; its weights are zeros, which are as large as any."""

    def __init__(self, config):
        self.config = config
        self.engine = build.engine(config)
        self.engine.start()
        self.model = initialize_parallel_model(config, self.engine, materialise=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
        self.optimizer = initialize_parallel_optimizer(config, self.engine, self.model)
        self.objective, self.schedule = build.objective(config), build.schedule(config)

    def batch(self):
        rows, length = self.config.run.data.micro_batch_size, self.config.run.data.seq_length
        ids = torch.randint(self.config.selected("model").config.vocab_size, (rows, length + 1))
        return Batch(input_ids=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())

    def step(self, micro_batches=1):
        batches = [self.batch() for _ in range(micro_batches)]
        train_step(self.model, self.optimizer, batches, self.objective, self.schedule, TrainState())

    def parameters(self):
        return [parameter for _, parameter in self.model.named_parameters()]


@pytest.fixture(scope="module")
def run():
    """A run that has made a step, so that the optimizer's state is there."""
    made = Run(config_of())
    made.step()
    return made


def memory_of(*overrides):
    return plan(config_of(*overrides)).estimate.fullest.memory


@pytest.mark.slow  # test_estimate_layouts.py measures the peak of each rank
def test_each_part_is_that_of_torchs_memory_tracker(run, hosts_loss):
    """One micro-batch a step, which is all that the tracker can follow."""
    memory = memory_of("data.global_batch_size=2")
    assert sum(parameter.numel() for parameter in run.parameters()) > 50e6
    tracker = MemTracker()
    tracker.track_external(*run.model.local_modules(), run.optimizer.inner)
    with tracker:
        run.step()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    assert memory.weights == found[_MemRefType.PARAM]
    assert memory.optimizer == pytest.approx(found[_MemRefType.OPT], rel=0.001)
    assert memory.gradients == pytest.approx(found[_MemRefType.GRAD], rel=WITHIN)
    # The tracker sorts by where a tensor was made: logits in forward, their gradient in backward.
    made = found[_MemRefType.ACT] + found[_MemRefType.TEMP]
    assert memory.activations + memory.logits + memory.workspace == pytest.approx(made, rel=WITHIN)
    assert memory.total == pytest.approx(found["Total"], rel=0.02)


@pytest.mark.slow
def test_several_micro_batches_add_whole_gradients(run, hosts_loss):
    memory = memory_of("data.global_batch_size=4")
    run.model.run_train([run.batch()], run.objective)
    gradients = [parameter.grad for parameter in run.parameters()]
    assert memory.gradients == sum(gradient.nbytes for gradient in gradients)
    second = run.batch()
    with LiveBytes([*run.parameters(), *gradients]) as live:
        run.model.run_train([second], run.objective)
    needed = memory.activations + memory.logits + memory.workspace
    assert needed == pytest.approx(sum(live.peak.values()), rel=WITHIN)
    for parameter in run.parameters():
        parameter.grad = None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_masters_have_gradients_once_a_micro_batch_has_made_them(micro_batches, hosts_loss):
    sizes = (*NARROW, "precision.type=mixed_precision", f"data.global_batch_size={2 * micro_batches}")
    run = Run(config_of(*sizes))
    batches = [run.batch() for _ in range(micro_batches)]
    with LiveBytes(run.parameters()) as live:
        run.model.run_train(batches, run.objective)
    memory = memory_of(*sizes)
    needed = memory.total - memory.optimizer  # with the copies of the weights, and without masters
    assert needed == pytest.approx(sum(live.peak.values()), rel=WITHIN)


def test_a_frozen_base_under_autocast_counts_in_bfloat16(hosts_loss):
    sizes = (*NARROW, "precision.type=autocast", "adapter.name=lora", "data.global_batch_size=2")
    run = Run(config_of(*sizes))
    batch = run.batch()
    with LiveBytes(run.parameters()) as live:
        run.model.run_train([batch], run.objective)
    memory = memory_of(*sizes)
    assert memory.weights == sum(parameter.nbytes for parameter in run.parameters())
    assert {parameter.dtype for parameter in run.parameters()} == {torch.float32, torch.bfloat16}
    assert memory.activations + memory.logits == pytest.approx(sum(live.peak.values()), rel=WITHIN)


def test_compiled_losses_make_no_copies_of_logits():
    logits = 2 * 64 * 4096 * torch.float32.itemsize
    written, compiled = (memory_of(*NARROW, f"model.compile={value}") for value in ("false", "true"))
    assert compiled.logits + compiled.workspace == pytest.approx(2 * logits, rel=0.1)
    assert written.logits > 2.5 * logits


@pytest.mark.parametrize(
    "recompute",
    [
        ("model.activations_checkpoint_granularity=null",),
        ("model.activations_checkpoint_granularity=full",),
        (
            "model.activations_checkpoint_granularity=selective",
            "model.activations_checkpoint_recompute=[LlamaMLP]",
        ),
    ],
    ids=["nothing", "full", "selective"],
)
def test_activations_are_what_autograd_saves(recompute):
    recompute = ("model.num_layers=2", *recompute)
    run = Run(config_of(*recompute))
    (module,) = run.model.local_modules()
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(run.batch().input_ids)
    kept = sum(storage.nbytes() for key, storage in saved.items() if key not in own)
    assert memory_of("data.global_batch_size=4", *recompute).activations == pytest.approx(kept, rel=WITHIN)


def test_recomputing_changes_nothing_but_activations_and_what_comes_of_them():
    changing = {"activations": 0, "workspace": 0, "logits": 0}
    whole, recomputed = (memory_of(f"model.activations_checkpoint_granularity={name}") for name in ("null", "full"))
    assert recomputed.activations < whole.activations / 5
    assert dataclasses.replace(recomputed, **changing) == dataclasses.replace(whole, **changing)


@pytest.mark.accelerator
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_accelerators_own_count_is_what_was_planned(precision, micro_batches):
    sizes = (
        "model.max_position_embeddings=1024",
        "data.seq_length=1024",
        f"data.global_batch_size={2 * micro_batches}",
    )
    config = config_of(*sizes, f"precision.type={precision}", "trainer.accelerator=auto")
    gc.collect()  # the runs of earlier cases are in reference cycles
    run = Run(config)
    run.step(micro_batches)
    profile_of(run.engine.device).operations.reset_max_memory(run.engine.device)
    run.step(micro_batches)
    assert plan(config).estimate.fullest.memory.total == pytest.approx(
        profile_of(run.engine.device).operations.max_memory_bytes(run.engine.device), rel=WITHIN
    )
