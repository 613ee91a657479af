"""Pipeline cuts and schedules: what each stage has, how long ranks wait, and what is refused in words. One process."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from nxdt_testing.errors import raises
from torch import nn

from nxdt_core.engine.layout import LayoutOptions, check_whole_backward, parallelize
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.pipeline.schedules import (
    Operation,
    bubble_fraction,
    check_micro_batches,
    make_schedule,
    schedule_operations,
)
from nxdt_core.engine.pipeline.split import cut_stage, stage_layers
from nxdt_core.errors.layouts import (
    LayersDoNotDivide,
    MicroBatchesDoNotFit,
    PipelineCutsDoNotFit,
    PipelinePlanMissing,
    TiedParametersCutApart,
    UnknownPipelineCut,
    ZeroBubbleCannot,
)
from nxdt_core.protocols.mesh import MeshSizes, rank_of_stage, stages_of_rank
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy

LAYERS = [f"layers.{number}" for number in range(6)]


def llama(*, tied=False):
    config = LlamaConfig(
        num_layers=6,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        vocab_size=32,
        share_embeddings_and_output_weights=tied,
    )
    return LlamaBuilder(config)


def test_layers_are_cut_evenly_or_where_the_cuts_say():
    assert [len(share) for share in stage_layers(LAYERS, 3)] == [2, 2, 2]
    assert stage_layers(LAYERS, 3, ["layers.0", "layers.3"]) == [
        ("layers.0",),
        ("layers.1", "layers.2", "layers.3"),
        ("layers.4", "layers.5"),
    ]
    assert stage_layers(LAYERS, 2, ["layers.5"])[1] == ()  # a last stage with nothing but norm and head


def test_layers_that_do_not_divide_are_refused_with_the_numbers():
    with raises(LayersDoNotDivide, match="6 layers do not divide into 4") as refused:
        stage_layers(LAYERS, 4)
    assert "the 3 modules" in refused.value.do()


def test_an_unknown_cut_is_refused_with_what_was_probably_meant():
    with raises(UnknownPipelineCut, match=r"Did you mean 'layers\.3'") as refused:
        stage_layers(LAYERS, 2, ["layer.3"])
    assert "'layers.0' to 'layers.5'" in refused.value.do()


@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.3", "layers.1"], ["layers.1", "layers.1"]])
def test_cuts_that_make_other_stages_are_refused(cuts):
    with raises(PipelineCutsDoNotFit, match="3 pipeline stages"):
        stage_layers(LAYERS, 3, cuts)


def test_a_stage_keeps_global_names_and_numbers_and_leaves_the_model_alone():
    model = llama().build()
    before = [name for name, _ in model.named_parameters()]
    middle = cut_stage(model, llama().plan(), stage=1, stages=3)
    assert list(middle.layers) == ["2", "3"]
    assert isinstance(middle.embed_tokens, nn.Identity)
    assert isinstance(middle.norm, nn.Identity)
    assert isinstance(middle.lm_head, nn.Identity)
    assert middle.rotary is not model.rotary
    assert {name for name, _ in middle.named_parameters()} < set(before)
    assert [name for name, _ in model.named_parameters()] == before


def test_stages_one_after_another_are_the_model():
    model, plan = llama().build().to(torch.float64), llama().plan()
    stages = [cut_stage(model, plan, stage=stage, stages=3, cuts=("layers.0", "layers.4")) for stage in range(3)]
    names = Counter(name for stage in stages for name, _ in stage.named_parameters())
    assert names == Counter(name for name, _ in model.named_parameters())
    ids = torch.randint(32, (2, 8))
    hidden = ids
    for stage in stages:
        hidden = stage(hidden)
    torch.testing.assert_close(hidden, model(ids), rtol=0, atol=1e-12)


def test_tied_ends_are_cut_apart_and_tied_layers_are_not():
    model = llama(tied=True).build()
    first, last = (cut_stage(model, llama(tied=True).plan(), stage=stage, stages=2) for stage in (0, 1))
    assert "embed_tokens.weight" in dict(first.named_parameters())
    assert "lm_head.weight" in dict(last.named_parameters())
    across = "layers.0.mlp.up_proj.weight", "layers.5.mlp.up_proj.weight"
    within = "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"
    for pair, refused in ((across, True), (within, False)):
        plan = ParallelPlan(tied=(pair,), pipeline=llama().plan().pipeline)
        if refused:
            with raises(TiedParametersCutApart, match="stages 0 and 2"):
                cut_stage(model, plan, stage=0, stages=3)
        else:
            cut_stage(model, plan, stage=0, stages=3)


def test_a_plan_without_a_pipeline_is_refused():
    with raises(PipelinePlanMissing, match="2 pipeline stages"):
        cut_stage(nn.Linear(1, 1), ParallelPlan(), stage=0, stages=2)


def test_stages_are_dealt_out_or_folded():
    assert [stages_of_rank(rank, 3, 1, "1f1b") for rank in range(3)] == [(0,), (1,), (2,)]
    assert [stages_of_rank(rank, 2, 3, "interleaved") for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [stages_of_rank(rank, 3, 1, "zbv") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    for schedule, vpp in (("1f1b", 1), ("interleaved", 3), ("zbv", 2)):
        for rank in range(4):
            stages = stages_of_rank(rank, 4, vpp, schedule)
            assert {rank_of_stage(stage, 4, schedule) for stage in stages} == {rank}


@pytest.mark.parametrize(
    ("schedule", "pp", "fitting"),
    [
        ("1f1b", 4, {4, 5, 6, 7, 8, 9, 10, 11}),
        ("interleaved", 4, {1, 2, 3, 4, 5, 6, 7, 8, 10}),
        ("interleaved", 2, {1, 2, 3, 4, 6, 8, 10}),
        ("zbv", 4, set(range(1, 12))),
    ],
)
def test_micro_batches_are_refused_exactly_where_the_stock_schedule_refuses_them(schedule, pp, fitting):
    for number in range(1, 12):
        stub = SimpleNamespace(num_stages=2 * pp, group_size=pp, group_rank=0, submod=nn.Identity())
        stages = [stub] * (1 if schedule == "1f1b" else 2)
        stub.num_stages = pp * len(stages)
        if number in fitting:
            check_micro_batches(schedule, pp=pp, micro_batches=number)
            make_schedule(schedule, stages, number, None)
        else:
            with raises(MicroBatchesDoNotFit, match=f"with PP {pp} wants .* and there are {number} ") as refused:
                check_micro_batches(schedule, pp=pp, micro_batches=number)
            assert refused.value.example == min(fitted for fitted in {*fitting, 12} if fitted >= number)
            with pytest.raises(ValueError, match="microbatches"):
                make_schedule(schedule, stages, number, None)


def test_one_pipeline_rank_takes_any_number_of_micro_batches():
    for schedule in ("1f1b", "interleaved", "zbv"):
        check_micro_batches(schedule, pp=1, micro_batches=1)


def test_zero_bubble_refuses_what_needs_backward_in_one_piece():
    with raises(ZeroBubbleCannot, match="activation recomputation"):
        check_whole_backward("zbv", recompute=True, compiled=False)
    with raises(ZeroBubbleCannot, match="compiled"):
        check_whole_backward("zbv", recompute=False, compiled=True)
    check_whole_backward("interleaved", recompute=True, compiled=True)
    mesh = ParallelMesh(MeshSizes(pp=2, vpp=2, schedule="zbv"), None)
    with raises(ZeroBubbleCannot, match="activation recomputation"):
        parallelize(llama(), mesh, LayoutOptions(recompute_granularity="full"), PrecisionPolicy(name="fp32"))


LAYOUTS = [
    ("1f1b", 2, 1, 8),
    ("1f1b", 4, 1, 4),
    ("interleaved", 2, 2, 4),
    ("interleaved", 4, 3, 8),
    ("zbv", 3, 2, 7),
    ("zbv", 4, 2, 1),
]


@pytest.mark.parametrize(("schedule", "pp", "vpp", "micro_batches"), LAYOUTS)
def test_operations_are_each_stage_and_micro_batch_once(schedule, pp, vpp, micro_batches):
    orders = schedule_operations(schedule, pp, vpp, micro_batches)
    kinds = ("forward", "backward_input", "backward_weight") if schedule == "zbv" else ("forward", "backward")
    expected = [
        Operation(kind, stage, index) for kind in kinds for stage in range(pp * vpp) for index in range(micro_batches)
    ]
    assert Counter(operation for order in orders for operation in order) == Counter(expected)
    for rank, order in enumerate(orders):
        assert {operation.stage for operation in order} == set(stages_of_rank(rank, pp, vpp, schedule))


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (2, 8), (4, 4), (8, 32)])
def test_the_bubbles_of_1f1b_and_interleaved_are_those_of_the_formula(pp, micro_batches):
    assert bubble_fraction("1f1b", pp, 1, micro_batches) == pytest.approx((pp - 1) / (micro_batches + pp - 1))
    for vpp in (2, 4):
        formula = (pp - 1) / (vpp * micro_batches + pp - 1)  # Narayanan et al. 2021, section 2.2.2
        assert bubble_fraction("interleaved", pp, vpp, micro_batches) == pytest.approx(formula)


def test_zero_bubble_waits_less_than_both():
    for pp, micro_batches in ((2, 8), (4, 16)):
        zbv = bubble_fraction("zbv", pp, 2, micro_batches)
        assert 0 <= zbv < bubble_fraction("interleaved", pp, 2, micro_batches) < 0.2
