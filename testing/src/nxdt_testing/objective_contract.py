"""Tests that every objective must pass; its author subclasses this once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.objective_contract import ObjectiveContract

    class TestMyLoss(ObjectiveContract):
        @pytest.fixture
        def factory(self):
            return MyLoss

        @pytest.fixture
        def section(self):
            return MyLossConfig(beta=0.5)

Separate tests must show that its loss is the one of its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from nxdt_core.models.step_boundary import called_with_step
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import StepContext
from nxdt_testing.contract import ComponentContract
from nxdt_testing.runs.documents import documents, in_rows
from nxdt_testing.runs.layouts import TriesLayouts
from nxdt_testing.runs.run import Parts, small_decoder

__all__ = ["ObjectiveContract"]

_VOCABULARY, _LENGTH = 32, 20
_LENGTHS = (9, 7, 11, 8)
_LAYOUTS = ("tp", "cp", "zero3", "pp")
_CLOSE, _CLOSE_FLOAT32 = 1e-9, 1e-3
"""Allowed differences, relative and absolute."""


class ObjectiveContract(ComponentContract, TriesLayouts):
    """The tests of an objective: subclass it and override the fixture ``factory``."""

    exhaustive = ("pp",)

    @pytest.fixture
    def objective(self, factory: Callable[[Any], Objective], section: Any) -> Objective:
        """Return the objective under test."""
        return factory(section)

    @pytest.fixture
    def traits(self, objective: Objective) -> ObjectiveTraits:
        """Return what it says of itself."""
        return objective.traits

    def test_it_has_the_members_of_the_protocol(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Loss and weight have one shape: a scalar, or [terms]."""
        assert isinstance(objective, Objective), "inherit from nxdt_core.protocols.objective.Objective"
        assert isinstance(traits, ObjectiveTraits), f"its traits are a {type(traits).__name__}; use ObjectiveTraits"
        batch, logits = _batch(traits)
        output = _output(objective, logits, batch)
        assert isinstance(output, ObjectiveOutput), f"it returns a {type(output).__name__}; return an ObjectiveOutput"
        assert output.loss_sum.dim() < 2, (
            f"its loss_sum has the shape {tuple(output.loss_sum.shape)}; sum the tokens up"
        )
        assert output.loss_sum.shape == output.weight.shape, (
            f"its loss_sum has the shape {tuple(output.loss_sum.shape)} and its weight {tuple(output.weight.shape)}"
        )

    def test_the_weight_is_known_before_the_forward_pass(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Micro-batches are divided by the sum of their weights, packed and blank ones too."""
        samples_of_micro_batches = documents(traits, _LENGTHS, vocabulary=_VOCABULARY)
        for samples in (
            [[each] for each in samples_of_micro_batches],
            [samples_of_micro_batches[:2], samples_of_micro_batches[2:], []],
            [samples_of_micro_batches[:1]],
        ):
            batch, logits = in_rows(samples, 2 * _LENGTH, traits)
            before, output = objective.weight(batch), _output(objective, logits, batch)
            after = output.weight
            assert torch.equal(before.float(), after.detach().float()), (
                f"weight(batch) is {before.tolist()}, and __call__ reports the weight {after.tolist()} for the same "
                f"{len(samples)} samples"
            )
            unweighed = torch.where(before > 0, 0.0, output.loss_sum.detach())
            assert (before > 0).any(), f"the weight of a batch with tokens to learn is {before.tolist()}"
            assert not unweighed.any(), f"a loss of {unweighed.tolist()} has the weight 0"

    def test_micro_batches_add_up_to_the_batch(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Losses, weights and metrics are sums; the step divides."""
        batch, logits = _batch(traits)
        whole = _figures(_output(objective, logits, batch))
        rows = traits.loss_rows or traits.rows_per_sample
        parts = [
            _figures(_output(objective, logits[row : row + rows], _rows(batch, slice(row, row + rows))))
            for row in range(0, len(logits), rows)
        ]
        total = {name: torch.stack([part[name] for part in parts]).sum(0) for name in whole}
        _assert_same(
            total, whole, f"of the whole batch, where {len(parts)} micro-batches add up; return sums, not means"
        )

    def test_ignored_labels_do_not_count(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Change the logits where the label is −100: loss and metrics stay, and no gradient is there."""
        if traits.head == "score":
            pytest.skip("the last token of a text has no label, and may have a score")
        batch, logits = _batch(traits)
        ignored = batch.labels == IGNORE_INDEX
        before = _figures(_output(objective, logits, batch))
        after = _figures(_output(objective, torch.where(ignored[..., None], logits.flip(-1) * 3 - 1, logits), batch))
        _assert_same(after, before, "where logits of ignored labels do not change")
        leaf = logits.clone().requires_grad_(True)
        torch.autograd.backward(_output(objective, leaf, batch).loss_sum.sum())
        assert leaf.grad is not None
        assert not leaf.grad[ignored].any(), "the loss has a gradient where the label is ignored"

    def test_loss_weights_scale_the_loss(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Divide each token's weight between two batches: where their weights add up to the whole, so do the losses."""
        batch, logits = _batch(traits)
        assert batch.loss_weights is not None
        shares = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(0))
        parts = [replace(batch, loss_weights=batch.loss_weights * share) for share in (shares, 1 - shares)]
        whole, first, second = (_output(objective, logits, part) for part in (batch, *parts))
        adds_up = torch.isclose(first.weight + second.weight, whole.weight)
        total, wanted = (
            torch.where(adds_up, loss.detach(), 0) for loss in (first.loss_sum + second.loss_sum, whole.loss_sum)
        )
        where = "with the sums of their loss weights; multiply the loss of each token by its weight"
        _assert_same({"loss_sum": total}, {"loss_sum": wanted}, where, 1e-6)

    def test_a_blank_sample_weighs_nothing(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """The last batch of a pass is filled up with samples that have no labels."""
        samples = documents(traits, _LENGTHS, vocabulary=_VOCABULARY)
        batch, logits = in_rows([[sample] for sample in samples], _LENGTH, traits)
        filled, more = in_rows([*([sample] for sample in samples), []], _LENGTH, traits)
        before, after = _figures(_output(objective, logits, batch)), _figures(_output(objective, more, filled))
        _assert_same(after, before, "without a blank sample in addition")
        blank, logits = in_rows([[]], _LENGTH, traits)
        for name, figure in _figures(_output(objective, logits.expand(-1, -1, _VOCABULARY), blank)).items():
            assert not figure.any(), f"{name} of a blank sample is {figure.tolist()} and not 0"

    def test_packed_documents_count_as_padded_ones(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """A document's loss does not depend on what shares its row; ``document_ids`` say which tokens it has."""
        samples = documents(traits, _LENGTHS, vocabulary=_VOCABULARY)
        batch, logits = in_rows([[sample] for sample in samples], _LENGTH, traits)
        packed, packed_logits = in_rows([samples[:2], samples[2:]], _LENGTH, traits)
        padded, packed_figures = (
            _figures(_output(objective, logits, batch)),
            _figures(_output(objective, packed_logits, packed)),
        )
        _assert_same(
            packed_figures, padded, f"of {len(samples)} documents that are padded to a row each and not packed into two"
        )

    def test_metrics_are_detached_sums(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """They are kept until the next log line, and must not keep a graph."""
        batch, logits = _batch(traits)
        output = _output(objective, logits.requires_grad_(True), batch)
        for name, figure in output.metrics.items():
            assert not figure.requires_grad, f"the metric {name!r} has a gradient; detach it"
            assert figure.dim() == 0 or figure.shape == output.weight.shape, (
                f"the metric {name!r} has the shape {tuple(figure.shape)}; return a scalar, or one for each weight"
            )

    def test_a_loss_of_narrow_logits_is_computed_in_float32(
        self, objective: Objective, traits: ObjectiveTraits
    ) -> None:
        """Sums over many tokens in bfloat16 would lose most of their digits."""
        batch, logits = _batch(traits)
        narrow = logits.bfloat16()
        expected, actual = (
            _figures(_output(objective, narrow.float(), batch)),
            _figures(_output(objective, narrow, batch)),
        )
        for name in ("loss_sum", "weight"):
            assert actual[name].dtype in (torch.float32, torch.float64), (
                f"{name} of bfloat16 logits is {actual[name].dtype}"
            )
        where = "of the same numbers in float32; use nxdt_core.models.loss"
        _assert_same(actual, {"loss_sum": expected["loss_sum"]}, where, _CLOSE_FLOAT32)

    def test_its_gradient_is_finite(self, objective: Objective, traits: ObjectiveTraits) -> None:
        """Also where the model is certain, rightly or wrongly, and the batch has a blank sample."""
        samples = documents(traits, _LENGTHS, vocabulary=_VOCABULARY)
        batch, logits = in_rows([*([sample] for sample in samples), []], _LENGTH, traits)
        for scale in (1.0, 1e4):
            leaf = (scale * logits).float().requires_grad_(True)
            loss = _output(objective, leaf, batch).loss_sum.sum()
            torch.autograd.backward(loss)
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all(), f"its gradient is not finite at logits of about {scale:g}"
            assert leaf.grad.any() or scale > 1, "its gradient is 0 everywhere"

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_layouts_agree(
        self,
        factory: Callable[[Any], Objective],
        section: Any,
        traits: ObjectiveTraits,
        layout: str,
        pytestconfig: pytest.Config,
    ) -> None:
        """On two ranks that share the vocabulary (TP), the tokens (CP), the samples or the layers of a model."""
        if traits.head == "score":
            pytest.skip("the decoder of these tests gives logits")
        builder = small_decoder()
        samples = documents(traits, (8, 7, 9, 6, 7, 8, 8, 8), vocabulary=builder.vocab_size)
        batches = [in_rows([samples[number : number + 2]], 16, traits)[0] for number in range(0, 8, 2)]
        parts = Parts(factory=factory, section=section)
        self.assert_agrees(layout, builder, pytestconfig, objective=parts, batches=batches)


def _batch(traits: ObjectiveTraits) -> tuple[Batch, torch.Tensor]:
    """Return a batch of some documents, each in its own row."""
    samples = documents(traits, _LENGTHS, vocabulary=_VOCABULARY)
    return in_rows([[sample] for sample in samples], _LENGTH, traits)


def _rows(batch: Batch, rows: slice) -> Batch:
    return replace(batch.map(lambda tensor: tensor[rows]), rows_per_sample=batch.rows_per_sample)


def _output(objective: Objective, logits: torch.Tensor, batch: Batch) -> ObjectiveOutput:
    output: ObjectiveOutput = called_with_step(objective, StepContext(), logits, batch)
    return output


def _figures(output: ObjectiveOutput) -> Mapping[str, torch.Tensor]:
    """Everything that is summed, by name."""
    figures = {"loss_sum": output.loss_sum, "weight": output.weight, **output.metrics}
    return {name: value.detach() for name, value in figures.items()}


def _assert_same(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str, close: float = _CLOSE
) -> None:
    for name, figure in expected.items():
        same = torch.allclose(actual[name].double(), figure.double(), rtol=close, atol=close)
        assert same, f"{name} is {actual[name].tolist()}, and {figure.tolist()} {where}"
