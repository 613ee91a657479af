"""What expert parallelism refuses, in words and numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.runs.moe import MoEBuilder
from nxdt_testing.runs.moe_config import MoEConfig, MoEModelConfig

from nxdt_core.engine.expert import apply_expert_parallel
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.errors.launch import ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.errors.layouts import ExpertsDoNotDivide, ModelWithoutExperts
from nxdt_core.models.patterns import modules_at
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan


def apply(config, *, plan=None, **sizes):
    builder = MoEBuilder(config)
    with torch.device("meta"):
        model = builder.build()
    before = dict(model.named_parameters())
    apply_expert_parallel(model, plan or builder.plan(), ParallelMesh(MeshSizes(**sizes), None))
    return model, before


def test_experts_must_divide():
    with raises(ExpertsDoNotDivide, match=r"'layers.0.moe.experts' has 6 experts, which 4 expert parallel ranks"):
        apply(MoEModelConfig(moe=MoEConfig(num_experts=6)), dp_shard=4, ep=4)


def test_the_width_of_experts_must_divide():
    with raises(ShardDoesNotDivide, match=r"'layers.0.moe.experts.gate_proj' has 30 output features"):
        apply(MoEModelConfig(ffn_hidden_size=30), tp=4)


def test_a_model_without_experts_cannot_share_them():
    with raises(ModelWithoutExperts, match=r"is 2, and the model's plan names no experts"):
        apply(MoEModelConfig(), plan=ParallelPlan(), dp_shard=2, ep=2)


def test_every_parameter_of_an_expert_needs_a_side_under_tp():
    plan = MoEBuilder(MoEModelConfig()).plan()
    plan = replace(plan, experts=replace(plan.experts, tensor={}))
    with pytest.raises(TensorPlanUnusable, match=r"does not say how 'layers.0.moe.experts.gate_proj' is cut"):
        apply(MoEModelConfig(), plan=plan, tp=2)


def test_one_rank_along_all_dimensions_changes_nothing():
    model, before = apply(MoEModelConfig(), dp_shard=4)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_the_experts_are_known_by_name():
    builder = MoEBuilder(MoEModelConfig(moe=MoEConfig(shared_ffn_hidden_size=16)))
    model = builder.build()
    assert [*modules_at(model, builder.plan().experts.modules)] == ["layers.0.moe.experts", "layers.1.moe.experts"]
