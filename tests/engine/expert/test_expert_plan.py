"""Planning a run with experts: no values, hence no routing, and still every size."""

from __future__ import annotations

import math

import pytest
from nxdt_testing.runs.moe import MoEBuilder
from nxdt_testing.runs.moe_config import MoEConfig, MoEModelConfig

from nxdt_core.config import load
from nxdt_core.engine.estimate.memory import StateBytes
from nxdt_core.engine.estimate.rank import Workload
from nxdt_core.engine.estimate.run import estimate
from nxdt_core.engine.layout import LayoutOptions
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.protocols.estimate import RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy

DATA = ("data.micro_batch_size=2", "data.global_batch_size=16", "data.seq_length=32", "trainer.accelerator=cpu")


class InChunks(MoEBuilder):
    """Sends tokens in several parts."""

    chunks = 1

    def build(self):
        model = super().build()
        for part in model.modules():
            if isinstance(part, LocalDispatcher):
                part.chunks = self.chunks
        return model


def planned(capacity_factor, *, chunks=1, **sizes):
    config = MoEModelConfig(moe=MoEConfig(num_experts=8, capacity_factor=capacity_factor))
    builder = InChunks(config)
    builder.chunks = chunks
    return estimate(
        Workload(
            run=load("recipe:llama-tiny", DATA).run,
            parts=RunParts(
                builder=builder, adapters=(), objective=CausalLM(None), precision=PrecisionPolicy(name="fp32")
            ),
            state=lambda shape, matrix: StateBytes(held=8 * math.prod(shape), saved=8 * math.prod(shape)),
            sizes=MeshSizes(**sizes),
            options=LayoutOptions(),
        )
    )


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_experts_and_their_traffic_are_in_the_plan(capacity_factor):
    one = planned(capacity_factor).fullest
    many = planned(capacity_factor, dp_shard=4, ep=4, tp=2).fullest
    experts = 2 * 8 * 3 * 32 * 32  # layers, experts, matrices
    whole = 2 * 8 * 32 + 5 * 32  # routers and norms, on each tensor parallel rank
    assert many.parameters == experts // 8 + whole + (one.parameters - experts - whole) // 2
    rows_bytes = 2 * 32 * 2 * 32 * 4  # micro-batch, sequence, top_k, hidden, float32
    trips = 2 * 2 * 2 * 2  # layers, micro-batches, there and back, forward and backward
    counts_bytes = 0 if capacity_factor else 2 * 2 * 8 * 8
    assert many.sent["ep"] == 3 * (trips * rows_bytes + counts_bytes) // 4  # three of four parts leave


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_chunks_send_the_same_and_hide_it_behind_experts(capacity_factor):
    whole = planned(capacity_factor, dp_shard=4, ep=4)
    chunked = planned(capacity_factor, chunks=4, dp_shard=4, ep=4)
    counts = 0 if capacity_factor else 3 * 3 * 2 * 2 * 8 * 8 // 4  # three more chunks, each with its counts
    assert chunked.fullest.sent["ep"] == whole.fullest.sent["ep"] + counts
    assert "ep" not in whole.hidden_behind
    assert chunked.never_hidden == {"ep": 1 / 4}
    active = 2 * 2 * 3 * 32 * 32  # layers, experts of a token, matrices
    assert chunked.hidden_behind["ep"] == pytest.approx(6 * active / chunked.flops_per_token)
