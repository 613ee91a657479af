"""What is planned of a layout: shares of ranks, traffic, idle time; and the refusal to guess."""

from dataclasses import asdict
from functools import cache

import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import Llama

from nxdt_core.config import load
from nxdt_core.engine.estimate import rank as workload
from nxdt_core.engine.estimate.rank import fake_mesh
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.models import ModelReadsValues
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train import TrainSession
from nxdt_core.train.plan import plan
from tests.train.small import SMALL

STRATEGY = "distributed_strategy."
TP, PP = f"{STRATEGY}tensor_model_parallel_size", f"{STRATEGY}pipeline_model_parallel_size"


@cache
def planned(*overrides, world=1):
    return plan(load("recipe:llama-tiny", [*overrides, f"trainer.devices={world}"])).estimate


def fullest(*overrides, world=1):
    return planned(*overrides, world=world).fullest


def test_one_process_holds_everything():
    found = planned()
    memory = found.fullest.memory
    assert found.parameters == found.trained == found.fullest.parameters == found.fullest.stored
    assert memory.weights == memory.gradients == 4 * found.parameters
    assert memory.optimizer == 8 * found.parameters
    assert memory.communication == 0
    assert found.fullest.sent == {}
    assert found.bubble == 0
    assert found.checkpoint_bytes == 12 * found.parameters


@pytest.mark.parametrize(("precision", "more"), [("mixed_precision", 2), ("fp32", 2), ("bf16SR", 0)])
def test_a_model_in_bfloat16_lies_beside_wider_weights_in_a_checkpoint(precision, more):
    plain, rounded = (
        planned(f"precision.type={precision}", f"checkpoint.save_bf16={on}").checkpoint_bytes
        for on in ("false", "true")
    )
    assert rounded - plain == more * planned().parameters


def test_tied_weights_count_once():
    tied = planned("model.share_embeddings_and_output_weights=true")
    assert planned().parameters - tied.parameters == 272 * 64
    assert tied.fullest.parameters == tied.parameters


def test_tensor_parallel_ranks_share_matrices_and_vocabulary():
    one, four = fullest(), fullest(f"{TP}=2", world=2)
    norms = (2 * 4 + 1) * 64
    assert four.parameters - norms == (one.parameters - norms) / 2


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [("1", 1.25, 1, 0.25), ("2", 1.25, 0.25, 0.25), ("3", 0.25, 0.25, 0.25)],
)
def test_zero_stages_share_what_they_say(stage, weights, gradients, optimizer):
    one, four = fullest(), fullest(f"{STRATEGY}zero_stage={stage}", world=4)
    assert four.stored == one.stored / 4
    assert four.memory.optimizer == pytest.approx(one.memory.optimizer * optimizer)
    layer = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64)  # one at work, one fetched ahead
    assert four.memory.weights - one.memory.weights * weights == (2 * layer if stage == "3" else 0)
    assert four.memory.gradients == one.memory.gradients * gradients


def test_pipeline_ranks_have_their_layers_and_micro_batches_in_flight():
    found = planned(f"{PP}=4", world=4)
    first, *_, last = found.ranks
    assert [rank.layers for rank in found.ranks] == [1, 1, 1, 1]
    assert [rank.stages for rank in found.ranks] == [(0,), (1,), (2,), (3,)]
    assert first.memory.logits == 0 < last.memory.logits
    assert found.fullest is first
    inner = found.ranks[1:3]
    assert inner[0].memory.activations / inner[1].memory.activations == pytest.approx(3 / 2, rel=0.05)
    assert last.parameters > inner[0].parameters
    assert found.bubble == pytest.approx(1 - 8 / (4 + 7 * found.longest_rank))  # 8 micro-batches wait for the last rank
    assert planned(f"{PP}=2", f"{STRATEGY}virtual_pipeline_model_parallel_size=2", world=2).bubble < 1 / 9


def test_no_rank_makes_a_gradient_of_the_whole_vocabulary():
    memory = fullest(f"{TP}=2", "model.vocab_size=65536", "data.seq_length=8", world=2).memory
    of_the_head = 65536 * 64 * 4 / 2
    assert of_the_head < memory.workspace + memory.logits < 1.6 * of_the_head


def test_sequence_parallelism_shares_the_activations_between_blocks():
    layout = (f"{TP}=2", "data.reset_attention_mask=false")
    without = fullest(*layout, world=2)
    with_it = fullest(*layout, f"{STRATEGY}sequence_parallel=true", world=2)
    norms = (2 * 4 + 1) * 2 * 128 * 64 * 4
    saved = without.memory.activations - with_it.memory.activations
    assert saved == pytest.approx(norms / 2, rel=0.05)
    assert with_it.memory.weights == without.memory.weights


def test_context_parallel_ranks_share_the_sequence():
    layout = "data.reset_attention_mask=false"
    one, two = fullest(layout), fullest(layout, f"{STRATEGY}context_parallel_size=2", world=2)
    assert two.memory.logits == pytest.approx(one.memory.logits / 2, rel=0.01)
    assert two.memory.activations == pytest.approx(one.memory.activations / 2, rel=0.1)
    assert two.sent["cp"] > 0


def test_attention_masks_of_packed_documents_count():
    packed, whole = fullest(), fullest("data.reset_attention_mask=false")
    mask = 2 * 128 * 128 * 4  # one for all layers
    assert packed.memory.activations - whole.memory.activations == pytest.approx(mask, rel=0.1)
    layout = ("trainer.accelerator=cuda", "model.num_layers=8")
    by_blocks, whole = fullest(*layout), fullest(*layout, "data.reset_attention_mask=false")
    assert by_blocks.memory.activations - whole.memory.activations < mask / 10


def test_tensor_parallel_traffic_is_that_of_the_blocks():
    sent = fullest(f"{TP}=2", f"{STRATEGY}sequence_parallel=true", world=2).sent
    hidden = 2 * 128 * 64 * 4
    # A block gathers and reduces, forward and backward; the head gathers, the embedding reduces, and each the reverse.
    expected = 8 * hidden / 2 * (2 * 4 * 4 + 2 + 2)
    assert sent["tp"] == pytest.approx(expected, rel=0.02)
    assert set(sent) == {"tp"}


def test_recomputed_blocks_communicate_again():
    layout = (f"{TP}=2", f"{STRATEGY}sequence_parallel=true")
    full = fullest(*layout, "model.activations_checkpoint_granularity=full", world=2)
    assert full.sent["tp"] > 1.3 * fullest(*layout, world=2).sent["tp"]


def test_data_parallel_traffic_follows_the_zero_stage():
    sent = [fullest(f"{STRATEGY}zero_stage={stage}", world=2).sent["dp"] for stage in (1, 2, 3)]
    gradients = 4 * planned().parameters / 2
    micro_batches = 4
    ends = 4 * (2 * 272 + 1) * 64 / 2  # embedding, head and last norm: gathered for forward alone
    times = (2, 1 + micro_batches, 3 * micro_batches)
    assert sent == pytest.approx([gradients * factor - (factor > 9) * micro_batches * ends for factor in times])
    assert fullest(f"{STRATEGY}zero1=false", world=2).sent["dp"] == pytest.approx(2 * gradients)


def test_pipeline_traffic_is_hidden_states_there_and_gradients_back():
    hidden = 2 * 128 * 64 * 4
    assert [rank.sent["pp"] for rank in planned(f"{PP}=4", world=4).ranks] == [
        8 * hidden * neighbours for neighbours in (1, 2, 2, 1)
    ]


def test_a_plan_leaves_no_process_group_behind_and_refuses_one_that_is_there():
    planned.__wrapped__(f"{TP}=2", world=2)
    assert not dist.is_initialized()
    sizes = MeshSizes(tp=2, dp_shard=3, pp=2)
    with fake_mesh(sizes, rank=7) as mesh:
        assert (mesh.rank("pp"), mesh.rank("fsdp"), mesh.rank("tp")) == (1, 0, 1)
        with pytest.raises(RuntimeError, match="process group"), fake_mesh(sizes):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "read",
    [lambda ids: ids.sum().item(), lambda ids: ids.tolist(), lambda ids: ids.nonzero(), lambda ids: bool(ids.any())],
)
def test_a_model_that_reads_values_is_told_and_a_bug_is_not(monkeypatch, read):
    plain = Llama.forward

    def forward(self, input_ids, **more):
        read(input_ids)
        return plain(self, input_ids, **more)

    monkeypatch.setattr(Llama, "forward", forward)
    with pytest.raises(ModelReadsValues, match="is_meta"):
        planned.__wrapped__()
    monkeypatch.setattr(Llama, "forward", lambda self, ids, **more: self.norm(ids.float()) @ ids.float())
    with pytest.raises(RuntimeError):
        planned.__wrapped__()


def test_a_run_can_be_planned_for_devices_that_are_not_here():
    # Devices differ in what attention keeps of packed documents and of shared heads.
    whole, alike = "data.reset_attention_mask=false", "model.num_kv_heads=4"
    for accelerator in ("cuda", "neuron"):
        assert planned(f"trainer.accelerator={accelerator}", whole, alike) == planned(whole, alike)
    with pytest.raises(ConfigError, match="abacus"):
        planned("trainer.accelerator=abacus")


def test_auto_is_the_accelerator_of_this_machine_where_there_is_one(monkeypatch):
    unknown = planned()
    monkeypatch.setattr(workload, "available_type", lambda: "cuda")
    assert planned.__wrapped__() == planned("trainer.accelerator=cuda") != unknown


def test_heads_that_a_device_does_not_share_are_counted():
    def kept(precision, kv_heads):
        keys = "data.reset_attention_mask=false", "trainer.accelerator=cuda", f"precision.type={precision}"
        return fullest(*keys, f"model.num_kv_heads={kv_heads}").memory.activations

    assert kept("fp32", 2) == kept("fp32", 4)
    assert kept("autocast", 2) < kept("autocast", 4)


@pytest.mark.slow  # its subject is time
def test_ten_thousand_ranks_take_no_longer():
    found = planned(f"{TP}=2", f"{PP}=2", "data.global_batch_size=10240", world=10240)
    assert len(found.ranks) == 2
    assert asdict(found.fullest)["memory"]["optimizer"] > 0


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optimizer_state_is_what_a_step_leaves(name):
    """Also state of other shapes than the parameter's, and of embeddings that muon leaves to AdamW."""
    config = load("recipe:llama-tiny", [*SMALL, f"model.optim.name={name}"])
    planned = plan(config).estimate
    with TrainSession(config) as session:
        session.step(next(session.batches()))
        held = [value for state in session.optimizer.inner.state.values() for value in state.values()]
    size = sum(value.nbytes for value in held if isinstance(value, torch.Tensor) and value.dim())
    assert planned.ranks[0].memory.optimizer == size
    assert planned.checkpoint_bytes == 4 * planned.parameters + size
