"""Tests that every parallel engine must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.engine_contract import EngineContract

    class TestMyEngine(EngineContract):
        engine = "mine"  # as parallel_engine.name; the plugin is installed, or its file is named in plugins

One process must train as a hand-written loop of plain torch does. What the record declares must work: each declared
layout trains on real ranks as one process does. What it does not declare must be refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.launch import EngineWithoutEstimate
from nxdt_core.models.loss import CausalLM, cross_entropies, cross_entropy_sum
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.step_boundary import called_with_step
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train import build
from nxdt_core.train.plan import run_parts
from nxdt_testing.contract import copied
from nxdt_testing.engine_runs import (
    LAYOUTS,
    MICRO,
    POLICIES,
    STEPS,
    VOCABULARY,
    EngineRuns,
    Settings,
    falling,
    steps,
)
from nxdt_testing.runs.run import EXACT, Run, differing, elements, fresh, global_batch

__all__ = ["LAYOUTS", "POLICIES", "EngineContract", "Settings"]


class TwoTerms(Objective):
    """An objective of two terms with different weights, and a metric."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of loss tokens, and of rows."""
        return torch.stack([batch.weight(), torch.tensor(float(len(batch.input_ids)))])

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """Cross-entropy per token, and the mean square of the logits per row."""
        loss, weight = cross_entropy_sum(logits, batch.labels, batch.loss_weights, step)
        square = logits.square().mean((1, 2)).sum()
        return ObjectiveOutput(
            loss_sum=torch.stack([loss, square]),
            weight=torch.stack([weight.to(loss), loss.new_tensor(float(len(logits)))]),
            metrics={"nll": loss.detach()},
        )


class EngineContract(EngineRuns):
    """Set :attr:`engine`. Everything else has a default."""

    engine: ClassVar[str]
    """Name of the engine in a configuration."""
    plugins: ClassVar[tuple[str, ...]] = ()
    """Plugin files to load, of an engine that is not installed."""
    accelerator: ClassVar[str] = HOST.type
    """``trainer.accelerator``."""
    float64: ClassVar[bool] = True
    """False for an engine that does not compute in float64, in which layouts are compared to the last digits."""

    @pytest.fixture
    def settings(self) -> Settings:
        """Return the settings with which each rank builds the run."""
        settings = Settings(engine=self.engine, plugins=self.plugins, accelerator=self.accelerator)
        return replace(settings, policy=EXACT) if self.float64 else settings

    @pytest.fixture
    def batches(self) -> list[Batch]:
        """Return one global batch."""
        return global_batch(VOCABULARY, micro=MICRO)

    @pytest.fixture
    def run(self, settings: Settings) -> Iterator[Run]:
        """Yield a model and its optimizer in one process."""
        with settings.run() as run:
            yield run

    # Training in one process

    @pytest.mark.parametrize("max_norm", [None, 0.05])
    def test_it_trains_as_a_loop_of_plain_torch_does(
        self, run: Run, batches: list[Batch], settings: Settings, max_norm: float | None
    ) -> None:
        """Losses, norms of gradients before clipping, and weights; norms of layers do not decay."""
        steps(run, batches, max_norm=max_norm)
        losses, norms, weights = _by_hand(run.config, settings.policy, batches, max_norm)
        assert run.losses == pytest.approx(losses, rel=settings.tolerance)
        assert run.norms == pytest.approx(norms, rel=10 * settings.tolerance)
        parameters = dict(run.model.named_parameters())
        assert parameters.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(elements(parameters[name]), weight, rtol=1e-4, atol=1e-5, msg=name)

    def test_the_loss_is_a_mean_over_the_whole_global_batch(self, run: Run, batches: list[Batch]) -> None:
        """``weight`` is the number of loss tokens of all micro-batches, which have different numbers."""
        step = run.model.run_train(batches, CausalLM())
        assert float(step.weight) == sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)

    def test_each_term_of_a_loss_is_divided_by_its_own_weight(self, run: Run, batches: list[Batch]) -> None:
        """So are metrics; the first weight is that of a scalar."""
        objective = TwoTerms()
        both = run.model.run_eval(batches, objective)
        nll = float(run.model.run_eval(batches, CausalLM()).loss)
        squares = [run.model.forward(batch.input_ids).square().mean((1, 2)).sum() for batch in batches]
        expected = nll + float(torch.stack(squares).sum()) / (4 * MICRO)
        assert float(both.loss) == pytest.approx(expected, rel=1e-4)
        assert float(both.metrics["nll"]) == pytest.approx(nll, rel=1e-4)

    def test_evaluation_gives_the_loss_and_changes_nothing(self, run: Run, batches: list[Batch]) -> None:
        """No gradients, no weights."""
        before = copied(run.model.state_dict())
        evaluated = float(run.model.run_eval(batches, CausalLM()).loss)
        assert all(parameter.grad is None for _, parameter in run.model.named_parameters())
        assert not differing(run.model.state_dict(), before)
        assert float(run.model.run_train(batches, CausalLM()).loss) == pytest.approx(evaluated, rel=1e-4)

    def test_a_step_that_is_not_finite_is_counted_and_leaves_the_weights(self, run: Run, batches: list[Batch]) -> None:
        """The next one updates them."""
        steps(run, batches, 1)
        before, state = copied(run.model.state_dict()), copied(run.optimizer.state_dict())
        run.model.run_train(batches, CausalLM())
        norm = run.optimizer.clip_grad_norm(None)
        run.optimizer.reject_unless_finite(torch.full_like(norm, float("nan")), norm)
        run.optimizer.step()
        assert int(run.optimizer.skipped_steps) == 1
        assert not differing(run.model.state_dict(), before)
        assert not differing(run.optimizer.state_dict(), state)
        steps(run, batches, 1)
        assert int(run.optimizer.skipped_steps) == 1
        assert differing(run.model.state_dict(), before)

    def test_gradients_are_cleared_by_a_step(self, run: Run, batches: list[Batch]) -> None:
        """Norms of two evaluations of the same gradient are equal, as nothing is added to the last one."""
        run.optimizer.set_lr_factor(0.0)
        norms = []
        for _ in range(2):
            run.model.run_train(batches, CausalLM())
            norms.append(float(run.optimizer.clip_grad_norm(None)))
            run.optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)

    # Outputs

    def test_forward_gives_logits_of_every_token(self, run: Run, batches: list[Batch]) -> None:
        """Compare the logits of the whole vocabulary, without a gradient; dropout is off."""
        ids = batches[0].input_ids[:, :7]
        logits = run.model.forward(ids)
        assert logits.shape == (*ids.shape, VOCABULARY)
        assert not logits.requires_grad
        assert torch.equal(logits, run.model.forward(ids))

    def test_log_probs_are_those_of_the_labels(self, run: Run, batches: list[Batch]) -> None:
        """0 at positions without a label; without a gradient."""
        for batch, log_probs in zip(batches, run.model.log_probs(batches), strict=True):
            logits, counts = run.model.forward(batch.input_ids).float().to(HOST), batch.labels != IGNORE_INDEX
            expected = -cross_entropies(logits, batch.labels) * counts
            torch.testing.assert_close(log_probs.float().to(HOST), expected, rtol=1e-4, atol=1e-4)
            assert not log_probs.requires_grad

    # Surroundings

    def test_alone_it_agrees_with_itself_and_is_shut_down_twice(self, run: Run) -> None:
        """``ranks`` gives back what it is given."""
        ranks, place = run.engine.ranks, run.engine.rank_info
        assert (ranks.rank, ranks.world_size, place.rank, place.world_size) == (0, 1, 0, 1)
        assert (place.dp_rank, place.dp_size) == (0, 1)
        assert ranks.broadcast_object("a") == "a"
        assert ranks.all_gather_object("a") == ["a"]
        assert ranks.on_rank_zero(lambda: "a") == "a"
        assert (ranks.any_rank(True), ranks.any_rank(False), ranks.largest_before(3)) == (True, False, 3)
        assert ranks.sibling(timeout_s=1).world_size == 1
        ranks.barrier()
        run.engine.shutdown()
        run.engine.shutdown()

    def test_an_estimate_counts_the_parameters(self, settings: Settings) -> None:
        """Compare the estimate of an engine that gives one with its parameters."""
        config = settings.config()
        engine = config.selected("engine").component.load_class(ParallelEngine)
        try:
            estimate = engine.estimate(config, run_parts(config))
        except EngineWithoutEstimate:
            pytest.skip("the engine gives no estimate")
        assert estimate.parameters == sum(
            parameter.numel() for parameter in build.model_builder(config).build().parameters()
        )
        assert estimate.micro_batches == 4


def _by_hand(
    config: ResolvedConfig, policy: PrecisionPolicy | None, batches: Sequence[Batch], max_norm: float | None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms of gradients, and the weights at the end, of a loop of plain torch."""
    builder, optim = build.model_builder(config), config.selected("optimizer").config
    plan, dtype = builder.plan(), "float32" if policy is None else policy.parameters
    module = fresh(builder, dtype=getattr(torch, dtype)).train()
    exempt = (*plan.no_weight_decay, *plan.norms)
    groups = [
        {
            "params": [p for name, p in module.named_parameters() if matches_any(exempt, name) is spared],
            "weight_decay": d,
        }
        for spared, d in ((False, optim.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    weight, tokens = (sum(float(count(batch)) for batch in batches) for count in (Batch.weight, Batch.tokens))
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * falling(step)
        total = 0.0
        for batch in batches:
            logits = called_with_step(module, StepContext(aux_loss_scale=1 / tokens), batch.input_ids)
            loss, _ = cross_entropy_sum(logits, batch.labels)
            torch.autograd.backward(loss / weight)
            total += float(loss.detach()) / weight
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(float(norm))
    return losses, norms, {name: parameter.detach() for name, parameter in module.named_parameters()}
