"""What every model builder must keep; its author subclasses it once, or once for each kind of model.

Example, the whole test file of a plugin::

    from nxdt_testing.model_contract import ModelContract

    class TestMyModel(ModelContract):
        @pytest.fixture
        def builder(self):
            return MyBuilder(MyConfig(num_layers=4, hidden_size=32, vocab_size=64))

A small model with an even number of layers is enough. Separate tests must show that it computes what it should.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.checkpoint.hf.directory import load_hf, save_hf
from nxdt_core.checkpoint.hf.key_map import sources
from nxdt_core.config import ReadsHFConfig
from nxdt_core.distributed.devices import HOST
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.engine.stages import cut_stage
from nxdt_core.engine.weights import check_rules
from nxdt_core.models.loss.cross_entropy import cross_entropy_sum
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.random.init import fresh_rules, initialize
from nxdt_core.protocols.model import HFExchange, ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_testing.models.hf_config import config_from_hf
from nxdt_testing.runs.layouts import LAYOUTS, compare, component_of, has_lora, planned_capabilities

__all__ = ["ModelContract"]

_SEED = 7
_DEFAULTS = ParallelPlan()
_STAGES = 2
_ROUNDING = 1e-4
"""Of the effect of a token; what a later token would have on a fresh model's logits is a hundred times as much."""


class ModelContract:
    """The tests of a model plugin: subclass it and override the fixture ``builder``."""

    replicated: ClassVar[tuple[str, ...]] = ()
    """Patterns of matrices that every tensor parallel rank holds whole on purpose, without a style that says so."""
    capabilities: ClassVar[frozenset[str] | None] = None
    """What the model's record declares. None: as the installed record says whose target is the builder's class, or,
    where there is none, independent of the plan's entries."""
    exchanges_with_hf: ClassVar[bool] = True
    """False for a kind of model that has no form there although the builder exchanges others."""

    def tries(self, layout: str, config: pytest.Config) -> bool:
        """Return whether this run of pytest trains in ``layout``, a key of
        :data:`nxdt_testing.runs.layouts.LAYOUTS`.

        By default exhaustive ones are left out, unless pytest has an option ``--samples`` and that is ``all``.
        """
        return not LAYOUTS[layout].exhaustive or config.getoption("samples", default=None) == "all"

    @pytest.fixture
    def builder(self) -> ModelBuilder:
        """Return a builder of a small model without dropout, whose sizes two ranks can share."""
        raise NotImplementedError("override the fixture 'builder'")

    @pytest.fixture
    def plan(self, builder: ModelBuilder) -> ParallelPlan:
        """Return the parallel plan of the builder under test."""
        return builder.plan()

    @pytest.fixture
    def model(self, builder: ModelBuilder) -> nn.Module:
        """Return the whole model with fresh weights, evaluating."""
        return _fresh(builder).eval()

    @pytest.fixture
    def exchange(self, builder: ModelBuilder) -> HFExchange:
        """Return the builder as one that exchanges with Hugging Face; tests of others are skipped."""
        if not self.exchanges_with_hf or not isinstance(builder, HFExchange):
            pytest.skip(f"this model of {type(builder).__name__} is not exchanged with Hugging Face")
        return builder

    # Building

    def test_it_has_the_members_of_the_protocol(self, builder: ModelBuilder) -> None:
        """Every method, and bounds that make sense."""
        assert isinstance(builder, ModelBuilder)
        assert builder.vocab_size > 0
        assert builder.max_sequence_length is None or builder.max_sequence_length > 0

    def test_it_is_built_on_meta_and_is_then_the_same(self, builder: ModelBuilder, model: nn.Module) -> None:
        """No memory is taken for weights, and ``reset_buffers`` computes what is not saved."""
        with torch.device("meta"):
            empty = builder.build()
        assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
        assert _shapes(empty) == _shapes(model)
        empty.to_empty(device=HOST)
        with torch.no_grad():  # what was in memory is anything; zeros could be right by chance
            for tensor in (*empty.parameters(), *empty.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        for part in empty.modules():
            getattr(part, "reset_buffers", lambda: None)()
        empty.load_state_dict(model.state_dict())
        ids = _tokens(builder, 2, 9)
        assert torch.equal(empty.eval()(ids), model(ids))

    def test_fresh_weights_follow_from_names_and_the_seed(self, builder: ModelBuilder) -> None:
        """Every parameter has a rule, nothing is left from building, and another seed gives other weights."""
        one, again, other = _fresh(builder), _fresh(builder), _fresh(builder, seed=_SEED + 1)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    # Computing

    def test_logits_have_a_row_of_the_vocabulary_for_each_token(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Logits are finite and [batch, seq, vocab_size]."""
        logits = model(_tokens(builder, 2, 9))
        assert logits.shape == (2, 9, builder.vocab_size)
        assert torch.isfinite(logits).all()

    def test_it_computes_in_the_dtype_of_its_weights(self, builder: ModelBuilder, model: nn.Module) -> None:
        """The precision policy chooses dtypes: a forward pass casts nothing to fewer bits than the weights have."""
        ids, cast = _tokens(builder, 2, 9), _HalfPrecision()
        with cast:
            model(ids)
        assert not cast.by, f"a float32 forward pass makes {cast.by[0]}"
        for dtype in (torch.float64, torch.bfloat16):
            found = model.to(dtype)(ids).dtype
            assert found == dtype, f"the logits of a model in {dtype} are {found}"

    def test_a_loss_reaches_every_parameter(self, builder: ModelBuilder, model: nn.Module) -> None:
        """It is that of a guess, about, and each parameter gets a gradient."""
        ids = _tokens(builder, 2, 9)
        total, weight = cross_entropy_sum(model.train()(ids[:, :-1]), ids[:, 1:])
        torch.autograd.backward(total / weight)
        assert torch.isfinite(total)
        idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, "these take no part"

    def test_no_token_sees_a_later_one(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Otherwise it would see what it predicts. (Rounding may differ where tokens are grouped.)"""
        ids = _tokens(builder, 1, 12)
        changed = ids.clone()
        changed[0, 7] = (changed[0, 7] + 1) % builder.vocab_size
        difference = (model(ids) - model(changed)).abs()[0].amax(-1)
        assert difference[7] > 0
        assert difference[:7].max() <= _ROUNDING * difference.max()

    def test_positions_default_to_the_place_in_the_row(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Without ``position_ids`` the positions of a row count from 0."""
        ids = _tokens(builder, 2, 9)
        torch.testing.assert_close(model(ids), model(ids, torch.arange(9).expand(2, 9)))

    def test_packed_documents_equal_documents_alone(self, builder: ModelBuilder, model: nn.Module) -> None:
        """With ``document_ids`` and positions that restart; in turn, so that nothing is kept from the batch before."""
        ids = _tokens(builder, 1, 20)
        for lengths in ((7, 13), (12, 8), (7, 13)):
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
            alone = [model(part) for part in torch.split(ids, list(lengths), 1)]
            torch.testing.assert_close(model(ids, positions, documents), torch.cat(alone, 1))

    def test_documents_do_not_see_one_another(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Also where positions continue from one to the next."""
        ids, documents = _tokens(builder, 1, 12), torch.tensor([[0] * 6 + [1] * 6])
        changed = ids.clone()
        changed[0, 2] = (changed[0, 2] + 1) % builder.vocab_size
        difference = (model(ids, None, documents) - model(changed, None, documents)).abs()[0].amax(-1)
        assert difference[2] > 0
        assert difference[6:].max() <= _ROUNDING * difference.max()

    # The plan

    def test_every_pattern_matches_something(self, builder: ModelBuilder, model: nn.Module, plan: ParallelPlan) -> None:
        """Match each pattern of the plan and of ``init_rules`` with a name of the model; norms start constant."""
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        idle = [path for path in _module_patterns(plan) if not any(matches(path, name) for name in modules)]
        idle += [path for path in _parameter_patterns(plan) if not any(matches(path, name) for name in parameters)]
        assert not idle
        check_rules(fresh_rules(builder, parameters), parameters, norms=plan.norms, of=type(builder).__name__)

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
            kept = matches_any((*plan.norms, *plan.no_weight_decay), name)
            assert kept or parameter.ndim > 1, f"{name} would decay"

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
        ids = _tokens(builder, 2, 9)
        wanted = _gradients(_fresh(builder), ids)
        choices: list[tuple[str, ...]] = [(name,) for name in plan.recompute]
        for names in choices if plan.pipeline is None else [*choices, ()]:
            module = _fresh(builder)
            apply_recompute(module, plan, granularity="selective" if names else "full", names=names)
            found = _gradients(module, ids)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), names or "whole layers"

    # Layouts

    def test_the_plan_has_what_the_record_declares(self, builder: ModelBuilder, plan: ParallelPlan) -> None:
        """A run that asks for a layout which the record declares must find it in the plan."""
        missing = (self._declared(builder) - {"lora"}) - planned_capabilities(plan)
        assert not missing, f"the record declares {', '.join(sorted(missing))}, and the plan has no entry for that"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_it_trains_in_a_layout_as_in_one_process(
        self, builder: ModelBuilder, layout: str, pytestconfig: pytest.Config
    ) -> None:
        """On real ranks: losses and the update of every parameter, for each layout that the record declares."""
        wanted = LAYOUTS[layout]
        missing = wanted.needs - self._declared(builder)
        if missing:
            pytest.skip(f"the model does not declare {', '.join(sorted(missing))}")
        if wanted.lora and not has_lora():
            pytest.skip("nxdt-plugin-lora is not installed")
        if not self.tries(layout, pytestconfig):
            pytest.skip("this run of pytest leaves the layout out")
        problems = compare(builder, wanted)
        assert not problems, (
            f"In the layout {' '.join(wanted.settings)} the model does not train as in one process: "
            f"{'; '.join(problems)}. Correct the plan, or what a module computes from the size of its shard. Values "
            "for each head or channel belong in a module that the plan names 'heads' or 'channels'."
        )

    # Pipelines

    def test_stages_have_the_names_and_weights_of_the_whole(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Each parameter is on one stage, a tied one also where it is used, drawn there as in the whole."""
        whole = dict(model.named_parameters(remove_duplicate=False))
        found: Counter[str] = Counter()
        for stage in _stages(builder):
            initialize(stage.named_parameters(), fresh_rules(builder, whole), _SEED)
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                found[name] += 1
                user_of = [owner for owner, user in builder.plan().tied if user == name]
                assert torch.equal(parameter, whole[name]) or user_of, name
        assert found == dict.fromkeys(whole, 1)

    def test_stages_in_turn_compute_what_the_whole_does(self, builder: ModelBuilder, model: nn.Module) -> None:
        """From hidden states [batch, seq, hidden_size] on, with the positions of the batch."""
        ids, positions = _tokens(builder, 2, 9), torch.arange(9).expand(2, 9)
        state, hidden = model.state_dict(), ids
        pipeline = builder.plan().pipeline
        for number, stage in enumerate(_stages(builder)):
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
            hidden = stage.eval()(hidden, positions)
            if number == 0 and pipeline is not None:
                assert hidden.shape == (2, 9, pipeline.hidden_size)
        assert torch.equal(hidden, model(ids, positions))

    # Counting

    def test_operations_follow_from_the_weights(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Six for each weight that a token is multiplied with (experts: some of theirs), and more with the sequence."""
        short, long = builder.flops_per_token(1), builder.flops_per_token(2)
        assert short <= long
        experts = builder.plan().experts.modules
        dense = everything = 0
        for path, part in model.named_modules():
            own = list(part.parameters(recurse=False))
            everything += sum(parameter.numel() for parameter in own)
            if not isinstance(part, nn.Embedding) and not matches_any(experts, path):
                dense += sum(parameter.numel() for parameter in own if parameter.ndim > 1)
        assert 6 * dense <= 2 * short - long <= 6 * everything

    # Hugging Face

    def test_a_directory_has_every_parameter_once_and_comes_back(
        self, builder: ModelBuilder, exchange: HFExchange, model: nn.Module, tmp_path: Path
    ) -> None:
        """Under one name each, bit for bit; rows that fill a parameter up are not in the directory."""
        assert exchange.hf_key_map()
        found, state = sources(builder), model.state_dict()
        names = [name for source in found for name in source.hf_names]
        assert len(set(names)) == len(names)
        save_hf(tmp_path / "out", builder, state)
        again = load_hf(tmp_path / "out", builder)
        users = {user for _, user in builder.plan().tied}
        assert again.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)} - users
        for source in found:
            rows = source.sections[0] if source.transform == "pad" else None
            assert torch.equal(again[source.name][:rows], state[source.name][:rows]), source.name

    def test_its_config_json_names_an_architecture_that_it_reads(self, exchange: HFExchange) -> None:
        """Find the builder by a name or a pattern of ``hf_architectures``."""
        names = exchange.config_to_hf()["architectures"]
        assert names
        assert all(matches_any(exchange.hf_architectures, name) for name in names)

    def test_its_config_json_is_read_back(
        self, builder: ModelBuilder, exchange: HFExchange, model: nn.Module, tmp_path: Path
    ) -> None:
        """Read the file by ``from_hf``, to a model that computes the same and writes the same ``config.json``."""
        written = json.loads(json.dumps(exchange.config_to_hf()))
        cls = type(getattr(builder, "config", None))  # what the builder was called with
        assert issubclass(cls, ReadsHFConfig), f"add the class method from_hf(hf) to {cls.__qualname__}"
        again = type(builder)(config_from_hf(cls, written))
        assert isinstance(again, HFExchange)
        assert json.loads(json.dumps(again.config_to_hf())) == written
        save_hf(tmp_path / "out", builder, model.state_dict())
        other = again.build().eval()
        other.load_state_dict(load_hf(tmp_path / "out", again), strict=False)  # of tied parameters it has one
        ids = _tokens(again, 2, 9)
        found = other(ids)
        expected = model(ids)[..., : found.shape[-1]]  # rows that fill a vocabulary up are not written
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    def _declared(self, builder: ModelBuilder) -> frozenset[str]:
        if self.capabilities is not None:
            return self.capabilities
        component = component_of(builder)
        return planned_capabilities(builder.plan()) if component is None else component.record.capabilities


class _HalfPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations whose results have 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtype = getattr(result, "dtype", None)
        if dtype in (torch.bfloat16, torch.float16):
            self.by.append(f"{dtype} by {func}")
        return result


def _fresh(builder: ModelBuilder, seed: int = _SEED) -> nn.Module:
    module = builder.build()
    initialize(module.named_parameters(), fresh_rules(builder, dict(module.named_parameters())), seed)
    return module


def _tokens(builder: ModelBuilder, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, builder.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _gradients(module: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    total, _ = cross_entropy_sum(module.train()(ids[:, :-1]), ids[:, 1:])
    torch.autograd.backward(total)
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def _stages(builder: ModelBuilder) -> Iterator[nn.Module]:
    plan = builder.plan()
    if plan.pipeline is None:
        pytest.skip("the plan has no pipeline")
    whole = builder.build()
    for stage in range(_STAGES):
        yield cut_stage(whole, plan, stage=stage, stages=_STAGES)


def _module_patterns(plan: ParallelPlan) -> Iterator[str]:
    """Those that the plan gives itself."""
    yield from (*plan.tensor, *plan.tensor_blocks, *plan.sequence_norms, *plan.attention_cores)
    yield from (*plan.experts.modules, *plan.experts.dispatchers, *plan.experts.routers)
    yield from (path for group in plan.recompute.values() for path in group)
    yield from plan.cheap
    if plan.heads is not None:
        yield from (*plan.heads.query, *plan.heads.key_value, *plan.heads.output)
    if plan.pipeline is not None:
        yield from (*plan.pipeline.first, plan.pipeline.layers, *plan.pipeline.last, plan.recompute_layer)


def _parameter_patterns(plan: ParallelPlan) -> Iterator[str]:
    yield from (*plan.norms, *plan.experts.tensor)
    if plan.no_weight_decay != _DEFAULTS.no_weight_decay:
        yield from plan.no_weight_decay
