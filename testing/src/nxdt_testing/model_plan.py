"""A model follows its parallel plan, and stages compute what the whole does: tests of the contract of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import nn

from nxdt_core.engine.pipeline.split import cut_stage
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.engine.weights import check_rules
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.random.init import complete_init_rules, initialize
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_testing.runs.run import SEED, built, differing, fresh

__all__ = ["ModelPlan", "tokens"]

_DEFAULTS = ParallelPlan()
_STAGES = 2


def tokens(builder: ModelBuilder, rows: int, length: int) -> torch.Tensor:
    """Return made-up tokens [rows, length]."""
    return torch.randint(0, builder.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


class ModelPlan:
    """The tests of a plan."""

    replicated: ClassVar[tuple[str, ...]] = ()
    """Patterns of matrices that every tensor parallel rank holds whole on purpose, without a style that says so."""

    def test_every_pattern_matches_something(self, builder: ModelBuilder, model: nn.Module, plan: ParallelPlan) -> None:
        """Match each pattern of the plan and of ``init_rules`` with a name of the model; norms start constant."""
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        of_modules = [*plan.tensor, *plan.tensor_blocks, *plan.attention_cores, *plan.cheap]
        of_modules += [*plan.experts.modules, *plan.experts.dispatchers, *plan.experts.routers]
        of_modules += [path for group in plan.recompute.values() for path in group]
        if plan.heads is not None:
            of_modules += [*plan.heads.query, *plan.heads.key_value, *plan.heads.output]
        if plan.pipeline is not None:
            of_modules += [*plan.pipeline.first, plan.pipeline.layers, *plan.pipeline.last, plan.recompute_layer]
        of_parameters = [*plan.norms, *plan.experts.tensor]
        of_parameters += [path for path in plan.no_weight_decay if path not in _DEFAULTS.no_weight_decay]
        idle = [path for path in of_modules if not any(matches(path, name) for name in modules)]
        idle += [path for path in of_parameters if not any(matches(path, name) for name in parameters)]
        assert not idle
        check_rules(complete_init_rules(builder, parameters), parameters, norms=plan.norms, of=type(builder).__name__)

    def test_each_matrix_is_planned_once(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Match each parameter with one pattern of ``tensor`` or ``experts.tensor``, a router, or one of
        :attr:`replicated`."""
        if not plan.tensor:
            pytest.skip("the plan has no tensor parallelism")
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            patterns = [path for path in plan.tensor if matches(path, owner)]
            patterns += [path for path in plan.experts.tensor if matches(path, name)]
            patterns += [path for path in plan.experts.routers if matches(path, owner)]
            patterns += [path for path in self.replicated if matches(path, name)]
            assert len(patterns) <= 1, f"{name} is planned by {patterns}"
            assert patterns or parameter.ndim < 2, f"{name} is not planned: every rank would hold it whole"

    def test_vectors_do_not_decay_unless_asked(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Scales of norms are in ``norms``, biases in ``no_weight_decay``; matrices decay."""
        for name, parameter in model.named_parameters():
            exempt = matches_any((*plan.norms, *plan.no_weight_decay), name)
            assert exempt or parameter.ndim > 1, f"{name} would decay"

    def test_parameters_that_are_one_are_named_as_tied(self, model: nn.Module, plan: ParallelPlan) -> None:
        """All of them, and no others."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        shared = {frozenset(same) for same in names.values() if len(same) > 1}
        assert {frozenset(pair) for pair in plan.tied} == shared

    def test_heads_divide_the_projections(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Rows of queries by query heads, of keys and values by theirs, columns of the output by query heads."""
        if plan.heads is None:
            pytest.skip("the plan has no heads")
        heads = plan.heads
        assert heads.query_heads % heads.kv_heads == 0
        for count, dim, patterns in (
            (heads.query_heads, 0, heads.query),
            (heads.kv_heads, 0, heads.key_value),
            (heads.query_heads, 1, heads.output),
        ):
            for name, parameter in model.named_parameters():
                if matches_any([f"{pattern}.weight" for pattern in patterns], name):
                    assert parameter.shape[dim] % count == 0, f"{name} has no {count} heads"

    def test_recomputation_changes_nothing(self, builder: ModelBuilder, plan: ParallelPlan) -> None:
        """Gradients are bit-equal, with any recomputation."""
        ids = tokens(builder, 2, 9)
        wanted = _gradients(fresh(builder), ids)
        choices: list[tuple[str, ...]] = [(name,) for name in plan.recompute]
        for names in choices if plan.pipeline is None else [*choices, ()]:
            module = fresh(builder)
            apply_recompute(module, plan, granularity="selective" if names else "full", names=names)
            gradients = _gradients(module, ids)
            assert not differing(gradients, wanted), names or "whole layers"

    # Pipelines

    def test_stages_have_the_names_and_weights_of_the_whole(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Each parameter is on one stage, a tied one also where it is used, drawn there as in the whole."""
        whole = dict(model.named_parameters(remove_duplicate=False))
        counts: Counter[str] = Counter()
        for stage in _stages(builder):
            initialize(stage.named_parameters(), complete_init_rules(builder, whole), SEED)
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                counts[name] += 1
                user_of = [owner for owner, user in builder.plan().tied if user == name]
                assert torch.equal(parameter, whole[name]) or user_of, name
        assert counts == dict.fromkeys(whole, 1)

    def test_stages_in_turn_compute_what_the_whole_does(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Stages begin with hidden states [batch, seq, hidden_size] and get the positions of the batch."""
        ids, positions = tokens(builder, 2, 9), torch.arange(9).expand(2, 9)
        state, hidden = model.state_dict(), ids
        pipeline = builder.plan().pipeline
        for number, stage in enumerate(_stages(builder)):
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
            hidden = stage.eval()(hidden, positions)
            if number == 0 and pipeline is not None:
                assert hidden.shape == (2, 9, pipeline.hidden_size)
        assert torch.equal(hidden, model(ids, positions))


def _gradients(module: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    total, _ = cross_entropy_sum(module.train()(ids[:, :-1]), ids[:, 1:])
    torch.autograd.backward(total)
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def _stages(builder: ModelBuilder) -> Iterator[nn.Module]:
    plan = builder.plan()
    if plan.pipeline is None:
        pytest.skip("the plan has no pipeline")
    whole = built(builder)
    for stage in range(_STAGES):
        yield cut_stage(whole, plan, stage=stage, stages=_STAGES)
