"""Tests that every model builder must pass; its author subclasses it once, or once for each kind of model.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.config.read import read_part
from nxdt_core.config.section import Section
from nxdt_core.config.tree import DEFAULT, Tree
from nxdt_core.distributed.devices import HOST
from nxdt_core.engine.weights import reset_buffers
from nxdt_core.errors.models import HFExchangeUnsupported
from nxdt_core.hf.directory import load_hf, save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_testing.contract import global_random_numbers_kept
from nxdt_testing.model_plan import ModelPlan, tokens
from nxdt_testing.runs.layouts import LAYOUTS, TriesLayouts, component_of, has_lora, planned_capabilities
from nxdt_testing.runs.run import SEED, built, differing, fresh

__all__ = ["ModelContract"]

_ROUNDING = 1e-4
"""Rounding error per effect of a token; a later token would change a fresh model's logits a hundred times as much."""
_ADVICE = (
    "Correct the plan, or what a module computes from the size of its shard. Values for each head or channel belong "
    "in a module that the plan names 'heads' or 'channels'."
)


class ModelContract(ModelPlan, TriesLayouts):
    """The tests of a model plugin: subclass it and override the fixture ``builder``."""

    capabilities: ClassVar[frozenset[str] | None] = None
    """Capabilities that the model's record declares. None: those of the installed record whose target is the builder's
    class; without such a record, those that the plan gives."""
    noisy: ClassVar[bool] = False
    """True if the model that the builder builds adds noise in training."""
    exchanges_with_hf: ClassVar[bool] = True
    """False for a kind of model that has no form there although the builder exchanges others."""
    exhaustive = tuple(name for name, layout in LAYOUTS.items() if layout.exhaustive)

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
        return fresh(builder).eval()

    @pytest.fixture
    def exchange(self, builder: ModelBuilder) -> ModelBuilder:
        """Return the builder as one that exchanges with Hugging Face; tests of others are skipped."""
        with suppress(HFExchangeUnsupported):
            if self.exchanges_with_hf and builder.hf_key_map():
                return builder
        pytest.skip(f"this model of {type(builder).__name__} is not exchanged with Hugging Face")

    # Building

    def test_it_has_the_members_of_the_protocol(self, builder: ModelBuilder) -> None:
        """Every method, and bounds that make sense."""
        assert isinstance(builder, ModelBuilder), "inherit from nxdt_core.protocols.model.ModelBuilder"
        assert builder.vocab_size > 0
        assert builder.max_sequence_length is None or builder.max_sequence_length > 0

    def test_it_is_built_on_meta_and_is_then_the_same(self, builder: ModelBuilder, model: nn.Module) -> None:
        """No memory is taken for weights, and ``reset_buffers`` computes what is not saved."""
        with torch.device("meta"), global_random_numbers_kept("building the model changes"):
            empty = builder.build()
        assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
        assert _shapes(empty) == _shapes(model)
        empty.to_empty(device=HOST)
        with torch.no_grad():  # what was in memory is anything; zeros could be right by chance
            for tensor in (*empty.parameters(), *empty.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        reset_buffers(empty)
        empty.load_state_dict(model.state_dict())
        ids = tokens(builder, 2, 9)
        assert torch.equal(empty.eval()(ids), model(ids))

    def test_fresh_weights_follow_from_names_and_the_seed(self, builder: ModelBuilder) -> None:
        """Every parameter has a rule, nothing is left from building, and another seed gives other weights."""
        one, again, other = (dict(fresh(builder, seed).named_parameters()) for seed in (SEED, SEED, SEED + 1))
        assert not differing(one, again)
        assert differing(one, other)

    # Computing

    def test_logits_have_a_row_of_the_vocabulary_for_each_token(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Logits are finite and [batch, seq, vocab_size]."""
        logits = model(tokens(builder, 2, 9))
        assert logits.shape == (2, 9, builder.vocab_size)
        assert torch.isfinite(logits).all()

    def test_it_computes_in_the_dtype_of_its_weights(self, builder: ModelBuilder, model: nn.Module) -> None:
        """The precision policy chooses dtypes: a forward pass casts nothing to fewer bits than the weights have."""
        ids, cast = tokens(builder, 2, 9), _HalfPrecision()
        with cast:
            model(ids)
        assert not cast.by, f"a float32 forward pass makes {cast.by[0]}"
        for dtype in (torch.float64, torch.bfloat16):
            dtype_of_logits = model.to(dtype)(ids).dtype
            assert dtype_of_logits == dtype, f"the logits of a model in {dtype} are {dtype_of_logits}"

    def test_it_computes_the_same_in_training_and_evaluation(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Without dropout, a validation judges the function that is trained."""
        if self.noisy:
            pytest.skip("it adds noise in training")
        ids = tokens(builder, 2, 9)
        evaluated = model(ids)
        torch.testing.assert_close(model.train()(ids), evaluated)

    def test_a_loss_reaches_every_parameter(self, builder: ModelBuilder, model: nn.Module) -> None:
        """It is that of a guess, about, and each parameter gets a gradient."""
        ids = tokens(builder, 2, 9)
        total, weight = cross_entropy_sum(model.train()(ids[:, :-1]), ids[:, 1:])
        torch.autograd.backward(total / weight)
        assert torch.isfinite(total)
        idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, "these take no part"

    def test_no_token_sees_a_later_one(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Otherwise it would see what it predicts. (Rounding may differ where tokens are grouped.)"""
        ids = tokens(builder, 1, 12)
        changed = ids.clone()
        changed[0, 7] = (changed[0, 7] + 1) % builder.vocab_size
        difference = (model(ids) - model(changed)).abs()[0].amax(-1)
        assert difference[7] > 0
        assert difference[:7].max() <= _ROUNDING * difference.max()

    def test_rows_of_a_batch_do_not_see_one_another(self, builder: ModelBuilder, model: nn.Module) -> None:
        """The size of a micro-batch changes memory and speed, and no result."""
        ids = tokens(builder, 3, 9)
        torch.testing.assert_close(model(ids)[:1], model(ids[:1]))

    def test_positions_default_to_the_place_in_the_row(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Without ``position_ids`` the positions of a row count from 0."""
        ids = tokens(builder, 2, 9)
        torch.testing.assert_close(model(ids), model(ids, torch.arange(9).expand(2, 9)))

    def test_packed_documents_equal_documents_alone(self, builder: ModelBuilder, model: nn.Module) -> None:
        """With ``document_ids`` and positions that restart; in turn, so that nothing is kept from the batch before."""
        ids = tokens(builder, 1, 20)
        for lengths in ((7, 13), (12, 8), (7, 13)):
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
            alone = [model(part) for part in torch.split(ids, list(lengths), 1)]
            torch.testing.assert_close(model(ids, positions, documents), torch.cat(alone, 1))

    def test_documents_do_not_see_one_another(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Also where positions continue from one to the next."""
        ids, documents = tokens(builder, 1, 12), torch.tensor([[0] * 6 + [1] * 6])
        changed = ids.clone()
        changed[0, 2] = (changed[0, 2] + 1) % builder.vocab_size
        difference = (model(ids, None, documents) - model(changed, None, documents)).abs()[0].amax(-1)
        assert difference[2] > 0
        assert difference[6:].max() <= _ROUNDING * difference.max()

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
        self.assert_agrees(layout, builder, pytestconfig, _ADVICE)

    # Counting

    def test_operations_follow_from_the_weights(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Six for each weight that a token is multiplied with (experts: some of theirs), and more with the sequence."""
        short, long = builder.flops_per_token(1), builder.flops_per_token(2)
        assert short <= long
        plan = builder.plan()
        dense = everything = 0
        for path, part in model.named_modules():
            matrices = [
                (parameter.numel(), parameter.ndim > 1 and not matches_any(plan.norms, f"{path}.{name}".lstrip(".")))
                for name, parameter in part.named_parameters(recurse=False)
            ]
            everything += sum(size for size, _ in matrices)
            if not isinstance(part, nn.Embedding) and not matches_any(plan.experts.modules, path):
                dense += sum(size for size, is_matrix in matrices if is_matrix)
        without_sequence = 2 * short - long
        assert 6 * dense <= without_sequence <= 6 * everything, (
            f"without the sequence's share flops_per_token is {without_sequence:g}; count six for each weight that a "
            f"token is multiplied with: {6 * dense:g} for all matrices, {6 * everything:g} for all weights"
        )

    # Hugging Face

    def test_a_directory_has_every_parameter_once_and_comes_back(
        self, builder: ModelBuilder, exchange: ModelBuilder, model: nn.Module, tmp_path: Path
    ) -> None:
        """Under one name each, bit for bit; rows that fill a parameter up are not in the directory."""
        tensors, state = sources(builder), model.state_dict()
        names = [name for source in tensors for name in source.hf_names]
        assert len(set(names)) == len(names)
        save_hf(tmp_path / "out", builder, state)
        again = load_hf(tmp_path / "out", builder)
        users = {user for _, user in builder.plan().tied}
        assert again.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)} - users
        for source in tensors:
            rows = source.sections[0] if source.transform == "pad" else None
            assert torch.equal(again[source.name][:rows], state[source.name][:rows]), source.name

    def test_its_config_json_names_an_architecture_that_it_reads(self, exchange: ModelBuilder) -> None:
        """Find the builder by a name or a pattern of ``hf_architectures``."""
        names = exchange.config_to_hf()["architectures"]
        assert names
        assert all(matches_any(exchange.hf_architectures, name) for name in names)

    def test_its_config_json_is_read_back(
        self, builder: ModelBuilder, exchange: ModelBuilder, model: nn.Module, tmp_path: Path
    ) -> None:
        """Read the file by ``from_hf``, to a model that computes the same and writes the same ``config.json``."""
        written = json.loads(json.dumps(exchange.config_to_hf()))
        cls = type(getattr(builder, "config", None))  # what the builder was called with
        values = cls.from_hf(written) if issubclass(cls, Section) else None
        assert values is not None, f"add the class method from_hf(hf) to {cls.__qualname__}"
        section = Tree({}, {(): DEFAULT})
        for key, value in values.items():
            section.set(key, value, DEFAULT)
        config, problems = read_part(cls, section, "model")
        assert not problems, f"its section does not take what from_hf returns: {'; '.join(map(str, problems))}"
        again = type(builder)(config)
        assert json.loads(json.dumps(again.config_to_hf())) == written
        save_hf(tmp_path / "out", builder, model.state_dict())
        other = built(again).eval()
        other.load_state_dict(load_hf(tmp_path / "out", again), strict=False)  # of tied parameters it has one
        ids = tokens(again, 2, 9)
        logits = other(ids)
        expected = model(ids)[..., : logits.shape[-1]]  # rows that fill a vocabulary up are not written
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)

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


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in (*module.named_parameters(), *module.named_buffers())}
