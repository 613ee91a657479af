"""Tests that every adapter must pass; its author subclasses this once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.adapter_contract import AdapterContract

    class TestMyAdapter(AdapterContract):
        name = "mine"

        @pytest.fixture
        def factory(self):
            return MyAdapter

        @pytest.fixture
        def section(self):
            return MyAdapterConfig(rank=2)

Options must leave out dropout. An adapter whose weights can be merged into the base's overrides ``merged``, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from nxdt_core.models.loss import CausalLM
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.init import initialize
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_testing.contract import ComponentContract, copied, no_error
from nxdt_testing.runs.layouts import TriesLayouts
from nxdt_testing.runs.run import EXACT, Parts, Run, differing, global_batch, run_config, small_decoder

__all__ = ["AdapterContract", "Merge"]

Merge = Callable[[Adapter, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Parameters of an adapted model by name → those of the plain one that computes the same."""

_RATE, _STEPS = 1e-2, 4
_RTOL, _ATOL = 1e-7, 1e-9
_LAYOUTS = ("tp", "zero3", "pp", "tp-sp")


class AdapterContract(ComponentContract, TriesLayouts):
    """The tests of an adapter: subclass it, set :attr:`name`, and override ``factory`` and ``section``."""

    name: ClassVar[str]
    """Name of the adapter's component."""
    trains_of_base: ClassVar[tuple[str, ...]] = ()
    """Patterns of parameters of the base that it trains on purpose."""

    exhaustive = ("pp", "tp-sp")

    @pytest.fixture
    def builder(self) -> ModelBuilder:
        """Return the builder of a small model that can be adapted; the default one has grouped-query attention and
        experts."""
        return small_decoder()

    @pytest.fixture
    def merged(self) -> Merge:
        """Return how weights are merged; override it where the adapter can do that."""
        pytest.skip("it is not merged: override the fixture 'merged' where that is wrong")

    @pytest.fixture
    def adapter(self, factory: Callable[[Any], Adapter], section: Any) -> Adapter:
        """Return the adapter of one run."""
        return factory(section)

    @pytest.fixture
    def run(self, adapter: Adapter, builder: ModelBuilder) -> Iterator[Run]:
        """Return a run that has not taken a step."""
        with _started(builder, adapter) as run:
            yield run

    @pytest.fixture
    def batches(self, builder: ModelBuilder) -> Sequence[Batch]:
        """Return what it trains on, and computes logits of."""
        return global_batch(builder.vocab_size)

    def test_it_has_the_members_of_the_protocol(self, adapter: Adapter) -> None:
        """Every method, and ``saves_base``."""
        assert isinstance(adapter, Adapter), "inherit from nxdt_core.protocols.adapter.Adapter"
        assert isinstance(adapter.saves_base, bool), f"its saves_base is {adapter.saves_base!r}; return True or False"

    def test_the_base_keeps_its_names_and_shapes(self, adapter: Adapter, builder: ModelBuilder) -> None:
        """Pretrained weights are loaded by name; nothing is allocated for what is added."""
        with torch.device("meta"):
            plain, module = builder.build(), builder.build()
            adapter.apply(module, builder.plan())
        wanted, adapted = (
            {name: p.shape for name, p in part.named_parameters(remove_duplicate=False)} for part in (plain, module)
        )
        missing = sorted(name for name, shape in wanted.items() if adapted.get(name) != shape)
        assert not missing, f"the adapted model has no {missing[0]!r} of the base's shape; keep names and shapes"
        elsewhere = sorted(name for name, parameter in module.named_parameters() if not parameter.is_meta)
        assert not elsewhere, f"the parameter {elsewhere[0]!r} is not on the meta device, where apply() is called"

    def test_only_its_own_parameters_train(self, adapter: Adapter, builder: ModelBuilder) -> None:
        """The base is frozen by ``requires_grad_(False)``, which saves its gradients and optimizer state."""
        with torch.device("meta"):
            base = {name for name, _ in builder.build().named_parameters(remove_duplicate=False)}
            module = builder.build()
            adapter.apply(module, builder.plan())
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        assert trained, "nothing of the adapted model is trained"
        thawed = sorted(name for name in trained & base if not matches_any(self.trains_of_base, name))
        assert not thawed, (
            f"it trains {thawed[0]!r} of the base; freeze it, or name it in trains_of_base where that is meant"
        )
        idle = [
            pattern for pattern in self.trains_of_base if not any(matches_any((pattern,), path) for path in trained)
        ]
        assert not idle, f"it trains nothing that matches {idle[0]!r} of trains_of_base"

    def test_added_parameters_have_rules(self, adapter: Adapter, builder: ModelBuilder) -> None:
        """A rule for each, so that first weights follow from name and seed in every layout."""
        module = builder.build()
        adapter.apply(module, builder.plan())
        rules = [*adapter.init_rules(), *builder.init_rules()]
        base = {name for name, _ in builder.build().named_parameters(remove_duplicate=False)}
        added = [(name, parameter) for name, parameter in module.named_parameters() if name not in base]
        patterns = [rule.pattern for rule in adapter.init_rules()]
        unruled = [name for name, _ in added if not matches_any(patterns, name)]
        assert not unruled, f"no rule of init_rules() is for {unruled[0]!r}"
        initialize(added, rules, 1)
        values = copied(added)
        initialize(added, rules, 1)
        again = differing(dict(added), values)
        assert not again, f"{again[0]!r} starts otherwise with the same seed"

    def test_it_changes_nothing_at_first(self, run: Run, builder: ModelBuilder, batches: Sequence[Batch]) -> None:
        """Training starts from the base: the logits of the adapted model are its own."""
        with _started(builder) as base:
            _assert_close(run.logits(batches), base.logits(batches), "before the first step; let updates start at zero")

    def test_training_moves_its_own_parameters_and_no_others(self, run: Run, batches: Sequence[Batch]) -> None:
        """After some steps the loss is lower, all that trains has moved, and the base is bitwise the same."""
        moved = {name for name, change in run.steps(batches, _STEPS).moved().items() if change.any()}
        may_move = run.model.added | {name for name in moved if matches_any(self.trains_of_base, name)}
        frozen = sorted(moved - may_move)
        assert not frozen, f"training changes {frozen[0]!r}, which is frozen"
        trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
        still = sorted(trained - moved)
        assert not still, f"{_STEPS} steps do not move {still[0]!r}: it takes no part in the loss"
        assert run.losses[-1] < run.losses[0], f"the losses of {_STEPS} steps are {run.losses} and do not fall"

    def test_it_computes_the_same_in_training_and_evaluation(self, run: Run, batches: Sequence[Batch]) -> None:
        """A validation judges the function that is trained, once updates are no longer zero."""
        evaluated = float(run.steps(batches, _STEPS).model.run_eval(batches, CausalLM()).loss)
        trained = run.steps(batches, 1).losses[-1]
        assert math.isclose(trained, evaluated, rel_tol=_RTOL), (
            f"the loss of a batch is {trained:.8g} in training, and {evaluated:.8g} in evaluation with the same weights"
        )

    def test_weights_that_are_loaded_compute_what_was_saved(
        self,
        run: Run,
        factory: Callable[[Any], Adapter],
        section: Any,
        builder: ModelBuilder,
        batches: Sequence[Batch],
    ) -> None:
        """Everything that training changed is in the parameters, of which checkpoints are made."""
        wanted = run.steps(batches, _STEPS).logits(batches)
        with _started(builder, factory(section)) as again:
            again.model.load_state_dict(run.model.state_dict())
            logits = again.logits(batches)
        _assert_close(logits, wanted, "in a model that loads the trained weights; keep what is trained in parameters")

    def test_it_resumes_from_its_own_section(self, adapter: Adapter, section: Any) -> None:
        """``check_resume`` accepts what the same configuration wrote."""
        saved = {"name": self.name, **({} if section is None else section.model_dump())}
        with no_error("check_resume refuses the section that it was built with:"):
            adapter.check_resume(saved, "memory://contract/step-00000001")

    def test_merged_weights_compute_what_unmerged_ones_do(
        self, run: Run, adapter: Adapter, builder: ModelBuilder, merged: Merge, batches: Sequence[Batch]
    ) -> None:
        """A model without the adapter computes the same with merged weights, once updates are no longer zero."""
        wanted = run.steps(batches, _STEPS).logits(batches)
        with _started(builder) as plain:
            plain.model.load_state_dict(merged(adapter, run.weights()))
            _assert_close(plain.logits(batches), wanted, "in the merged model")

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_layouts_agree(
        self,
        factory: Callable[[Any], Adapter],
        section: Any,
        builder: ModelBuilder,
        layout: str,
        pytestconfig: pytest.Config,
    ) -> None:
        """On two ranks the adapted model trains as in one process."""
        self.assert_agrees(layout, builder, pytestconfig, adapter=Parts(factory=factory, section=section))


def _started(builder: ModelBuilder, *adapters: Adapter) -> Run:
    config = run_config("model.optim.name=adamw", f"model.optim.lr={_RATE}")
    return Run(config, builder=builder, policy=EXACT, adapters=adapters)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    difference = float((actual - expected).abs().max())
    assert torch.allclose(actual, expected, rtol=_RTOL, atol=_ATOL), f"logits differ by up to {difference:.3g} {where}"
