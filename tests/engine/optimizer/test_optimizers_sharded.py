"""Every optimizer in layouts that cut its parameters: losses, weights and state of one process; groups by pattern."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from nxdt_core.errors.base import NxdtError
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer
from tests.engine.matrix.training import whole
from tests.engine.optimizer.optimizing import (
    EVEN,
    NAMES,
    STRATEGY,
    TP2,
    Run,
    clipped,
    configuration,
    saved,
    train,
    train_rows,
)
from tests.sampling import asked, slow_except

PADDED = (TP2, f"{STRATEGY}sequence_parallel=true", f"{STRATEGY}pad_heads=true")
EP2 = f"{STRATEGY}expert_model_parallel_size=2"
OF_WHOLES = ("adafactor", "muon", "novograd")
LAYOUTS = {
    "dp2": (2, (), NAMES, False),
    "tp2-padded": (2, PADDED, OF_WHOLES, False),
    "dp2-tp2-padded": (4, PADDED, (*OF_WHOLES, "adamw"), False),
    "dp2-zero2": (2, (f"{STRATEGY}zero_stage=2",), OF_WHOLES, False),
    "dp2-zero3": (2, (f"{STRATEGY}zero_stage=3",), OF_WHOLES, False),
    "pp2": (2, (f"{STRATEGY}pipeline_model_parallel_size=2", "model.num_layers=2"), OF_WHOLES, False),
    "dp2-ep2": (2, (EP2,), OF_WHOLES, True),
    "dp2-ep2-tp2": (4, (EP2, TP2), OF_WHOLES, True),
}
"""ZeRO-1 where nothing else is said. Ranks, overrides, optimizers, and whether the model has experts."""
FIRST = {"dp2": ("adamw",), "tp2-padded": OF_WHOLES, "dp2-ep2": OF_WHOLES}
"""Optimizers of the default run by layout: those that reduce over matrices, and one that torch updates element by
element."""
EACH = [(layout, name) for layout, (_, _, names, _) in LAYOUTS.items() for name in names]
CASES = slow_except(EACH, [(layout, name) for layout, names in FIRST.items() for name in names])


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory, request):
    """``trained(layout)``: what each rank finds, and where they saved; each layout runs once. Only
    those of several ranks resume."""
    taken = asked(request, "name")

    @cache
    def run(world, overrides, names, experts):
        names = tuple(name for name in names if name in taken)
        directory = tmp_path_factory.mktemp("run")
        more = (f"trainer.devices={world}", "model.num_layers=1", *overrides)
        return ranks(world).run(train, directory, more, names, experts, world > 1, timeout_s=240), directory

    return run


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_shards_train_as_the_whole_does(trained, layout, name):
    _, overrides, _, experts = LAYOUTS[layout]
    sizes = tuple(each for each in overrides if each.startswith("model."))
    (whole,), at_one = trained(1, sizes, OF_WHOLES if experts or sizes else NAMES, experts)
    found, at_many = trained(*LAYOUTS[layout])
    losses, _ = whole[name]
    assert losses[-1] < losses[0], "it does not learn, and hides mistakes"
    for rank in found:
        assert rank[name][0] == pytest.approx(losses, rel=1e-9)
    weights, expected = saved(at_many, name, experts), saved(at_one, name, experts)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-7, atol=1e-10, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_resume_goes_on_to_the_bit(trained, layout, name):
    found, _ = trained(*LAYOUTS[layout])
    assert all(rank[name][1] for rank in found)


@pytest.fixture(scope="module")
def clipped_alone(ranks, tmp_path_factory):
    """What unfused kernels find in one process, whose gradients are scaled before them."""
    ((losses, state),) = ranks(1).run(clipped, tmp_path_factory.mktemp("alone"), ("model.optim.fused=false",))
    return losses, state


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((TP2,), id="tp2"),
        pytest.param((f"{STRATEGY}pipeline_model_parallel_size=2",), id="pp2"),
        pytest.param((f"{STRATEGY}zero1=false",), id="dp2"),
        pytest.param((), id="zero1"),
        pytest.param((f"{STRATEGY}zero_stage=2",), id="zero2"),
        pytest.param((f"{STRATEGY}zero_stage=3",), id="zero3"),
    ],
)
def test_fused_kernels_clip_shards_as_the_whole(ranks, clipped_alone, tmp_path, layout):
    losses, expected = clipped_alone
    state = {}
    for found, of_rank in ranks(2).run(clipped, tmp_path, ("trainer.devices=2", *layout)):
        assert found == pytest.approx(losses, rel=1e-5)
        state |= of_rank
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4 * float(value.abs().max()))
        close(state[key], value, msg=f"{key}: {{}}".format)


def build_stock(directory, optimizer):
    """What is raised where one of torch's optimizers is built over what this rank holds."""
    config = configuration("sgd", directory, ("trainer.devices=2",))
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    make = getattr(torch.optim, optimizer)

    def factory(groups, section):
        matrices = [p for group in groups for p in group["params"] if p.ndim == 2]
        return make(matrices, lr=section.lr)

    try:
        engine.initialize_optimizer(model, factory, config.selected("optimizer").config, decay_norms=False)
    except NxdtError as error:
        return str(error)
    finally:
        engine.shutdown()
    return None


@pytest.mark.parametrize("optimizer", ["Adafactor", "Muon"])
def test_torch_s_own_that_would_take_shards_for_wholes_are_refused(ranks, tmp_path, optimizer):
    for told in ranks(2).run(build_stock, tmp_path, optimizer):
        assert f"torch.optim.{optimizer} computes with whole parameters" in told
        assert "layers.0" in told
        assert "zero1=false" in told


def test_state_that_differs_between_shards_is_not_saved(ranks, tmp_path):
    zero3 = ("trainer.devices=2", f"{STRATEGY}zero_stage=3", "model.num_layers=1")
    for said in ranks(2).run(train_rows, tmp_path, zero3, False):
        assert "[NXDT-T025] Optimizer state differs between ranks that have shards of one parameter" in said
        assert "layers.0" in said
        assert "/rows" in said


def test_state_that_does_not_fit_shards_is_named(ranks, tmp_path):
    assert ranks(1).run(train_rows, tmp_path, ("model.num_layers=1",), False) == [None]
    assert ranks(1).run(train_rows, tmp_path, ("model.num_layers=1",), True) == [None]
    zero3 = ("trainer.devices=2", f"{STRATEGY}zero_stage=3", "model.num_layers=1")
    for said in ranks(2).run(train_rows, tmp_path, zero3, True):
        assert "[NXDT-T025] Optimizer state does not fit this layout" in said
        assert "/rows" in said


def build_groups(directory, overrides):
    """Rates and decays by name on this rank, or what is raised."""
    config = configuration("sgd", directory, overrides)
    engine = build.engine(config)
    engine.start()
    try:
        model = initialize_parallel_model(config, engine)
        optimizer = initialize_parallel_optimizer(config, engine, model)
    except NxdtError as error:
        return str(error)
    finally:
        engine.shutdown()
    return {name: (g["lr"], g["weight_decay"]) for g in optimizer.inner.param_groups for name in g["names"]}


PP2 = ("trainer.devices=2", f"{STRATEGY}pipeline_model_parallel_size=2")
GROUPS = (
    "model.optim.param_groups=[{params: layers.*.mlp.*.weight, lr: 0.5}, {params: layers.1.mlp.down_proj.weight, "
    "weight_decay: 0.2}, {params: norm.weight, weight_decay: 0.3}]"
)


def test_groups_by_pattern_are_the_same_whichever_stage_has_the_parameters(ranks, tmp_path):
    (whole,) = ranks(1).run(build_groups, tmp_path, (GROUPS,))
    first, last = ranks(2).run(build_groups, tmp_path, (GROUPS, *PP2))
    assert first | last == whole
    assert not first.keys() & last.keys()
    assert whole["layers.0.mlp.down_proj.weight"] == (0.5, 0.1)
    assert whole["layers.1.mlp.down_proj.weight"] == (0.3, 0.2)
    assert whole["norm.weight"] == (0.3, 0.3)
    assert whole["layers.1.attention.o_proj.weight"] == (0.3, 0.1)


def test_a_pattern_that_chooses_nothing_on_any_stage_is_refused_on_all(ranks, tmp_path):
    wrong = GROUPS.replace("layers.*.mlp", "layers.*.nlp")
    for told in ranks(2).run(build_groups, tmp_path, (wrong, *PP2)):
        assert "this pattern chooses no trained parameter: 'layers.*.nlp.*.weight'" in told


SCALED = (
    "model.optim.param_groups=[{params: layers.0, lr_scale: 0.5}, {params: '*.mlp.*.weight', lr: 0.02, lr_scale: 0.25},"
    " {params: embed_tokens, lr_scale: 0}]"
)
WARMED = (
    SCALED,
    "model.optim.sched={name: LinearAnnealingWithWarmUp, warmup_steps: 2}",
    "model.optim.weight_decay=0.0",
)


def scaled_steps(directory, overrides):
    """Weights before and after some steps, whole, the factors of the schedule, and the tokens."""
    config = configuration("adamw", directory, overrides)
    engine = build.engine(config)
    engine.start()
    run = Run(config, engine)
    before = {name: whole(weight) for name, weight in run.model.named_parameters()}
    run.steps(3)
    after = {name: whole(weight) for name, weight in run.model.named_parameters()}
    engine.shutdown()
    return before, after, [run.schedule(step) for step in range(3)], run.ids


def test_scaled_rates_are_those_of_a_loop_in_torch(ranks, tmp_path):
    ((before, after, factors, ids),) = ranks(1).run(scaled_steps, tmp_path, WARMED)
    assert len({*factors}) > 1
    module = build.model_builder(configuration("adamw", tmp_path, WARMED)).build().double()
    module.load_state_dict(before)

    def rate(name):
        if name.startswith("embed_tokens"):
            return 0.0
        if ".mlp." in name and name.endswith("_proj.weight"):
            return 0.02 * 0.25
        return 0.01 * (0.5 if name.startswith("layers.0.") else 1.0)

    groups = [{"params": [weight], "lr": rate(name)} for name, weight in module.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for factor in factors:
        optimizer.zero_grad()
        logits = module(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        optimizer.step()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-9, atol=1e-11, msg=f"{name}: {{}}".format)
    assert torch.equal(after["embed_tokens.weight"], before["embed_tokens.weight"])
    for more in (PP2, ("trainer.devices=2", TP2, *EVEN)):
        alone = after if more is PP2 else ranks(1).run(scaled_steps, tmp_path, (*WARMED, *EVEN))[0][1]
        for found in ranks(2).run(scaled_steps, tmp_path, (*WARMED, *more)):
            for name, weight in found[1].items():
                torch.testing.assert_close(weight, alone[name], rtol=1e-9, atol=1e-11)
