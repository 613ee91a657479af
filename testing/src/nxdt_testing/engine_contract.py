"""What every parallel engine must keep; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.engine_contract import EngineContract

    class TestMyEngine(EngineContract):
        engine = "mine"  # as parallel_engine.name; the plugin is installed, or its file is named in plugins

One process must train as a hand-written loop of plain torch does. What the record declares must work: each declared
layout trains on real ranks as one process does. What it does not declare must be refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import piece_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError
from nxdt_core.models.loss.cross_entropy import cross_entropies, cross_entropy_sum
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.init import fresh_rules, initialize
from nxdt_core.models.step_border import called_with_step
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import ObjectiveOutput
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.estimate import EstimatesRuns
from nxdt_core.protocols.parallel.model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.train import build
from nxdt_core.train.causal_lm import CausalLM
from nxdt_core.train.plan import run_parts
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step
from nxdt_testing.models.scale_adapter import ADDED
from nxdt_testing.ranks import RankPool

__all__ = ["LAYOUTS", "POLICIES", "EngineContract"]

_SEED, _VOCABULARY, _LENGTH, _ROWS, _MICRO, _STEPS = 5, 64, 16, 8, 2, 3
_STRATEGY = "distributed_strategy"
_TP = f"{_STRATEGY}.tensor_model_parallel_size=2"
_PP = f"{_STRATEGY}.pipeline_model_parallel_size=2"
_VPP = f"{_STRATEGY}.virtual_pipeline_model_parallel_size=2"
_CP = f"{_STRATEGY}.context_parallel_size=2"
_UNSHARDED = f"{_STRATEGY}.zero1=false"

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "dp": (2, (_UNSHARDED,)),
    "zero1": (2, (f"{_STRATEGY}.zero_stage=1",)),
    "zero2": (2, (f"{_STRATEGY}.zero_stage=2",)),
    "zero3": (2, (f"{_STRATEGY}.zero_stage=3",)),
    "dp_replicate": (4, (f"{_STRATEGY}.dp_replicate=2",)),
    "tp": (2, (_TP,)),
    "sp": (2, (_TP, f"{_STRATEGY}.sequence_parallel=true")),
    "pp:1f1b": (2, (_PP,)),
    "pp:interleaved": (2, (_PP, _VPP)),
    "pp:zbv": (2, (_PP, f"{_STRATEGY}.pipeline_schedule=zbv")),
    "cp": (2, (_CP, _UNSHARDED)),
    "cp:ring": (2, (_CP, _UNSHARDED, f"{_STRATEGY}.context_parallel_method=ring")),
    "cp:gather": (2, (_CP, _UNSHARDED, f"{_STRATEGY}.context_parallel_method=gather")),
    "ep": (2, (f"{_STRATEGY}.expert_model_parallel_size=2",)),
}
"""Capability → ranks, and the overrides that need it."""

_SETTINGS = {
    "recompute": "model.activations_checkpoint_granularity=full",
    "compile": "model.compile=true",
    "param_groups": "model.optim.param_groups=[{params: 'lm_head.*', lr: 0.0}]",
    "adapters": "adapter.name=engine-contract",
}
"""Capability → an override of a run of one process that needs it."""

POLICIES = ("mixed_precision", "mixed_precisionSR", "bf16SR", "autocast")
"""Values of ``precision.type``, each of which needs another capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rank needs to build the same run."""

    engine: str
    plugins: tuple[str, ...] = ()
    accelerator: str = HOST.type
    policy: PrecisionPolicy = field(default_factory=lambda: PrecisionPolicy(name="fp32"))

    @cache  # noqa: B019
    def config(self, *overrides: str) -> ResolvedConfig:
        """Return the run of the contract under this engine, loaded once: most tests ask for the same."""
        parts = str(Path(__file__).parent / "runs" / "engine_parts.py")
        run = {
            "name": "engine-contract",
            "plugins": {"local": [parts, *self.plugins]},
            "parallel_engine": {"name": self.engine},
            "trainer": {"max_steps": _STEPS, "accelerator": self.accelerator},
            "data": {
                "name": "none",
                "seq_length": _LENGTH,
                "global_batch_size": _ROWS,
                "micro_batch_size": _MICRO,
            },
            "model": {
                "name": "engine-contract",
                "num_layers": 4,
                "vocab_size": _VOCABULARY,
                "optim": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "sched": {"name": "constant"}},
            },
            "precision": {"type": "fp32"},
        }
        return load(run, overrides)


@dataclass(slots=True)
class Run:
    """A model and its optimizer in an engine, and what its steps gave."""

    config: ResolvedConfig
    engine: ParallelEngine
    model: ParallelModel
    optimizer: ParallelOptimizer
    state: TrainState = field(default_factory=TrainState)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of gradients, before clipping."""
    weight_norms: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, config: ResolvedConfig, policy: PrecisionPolicy | None = None, *, seed: int = _SEED) -> Run:
        """Start the engine and build; ``policy`` is another one than the configuration's."""
        engine = build.engine(config)
        engine.start()
        model = engine.initialize_model(
            build.model_builder(config),
            precision=policy or build.precision(config),
            seed=seed,
            adapters=build.adapters(config),
        )
        return cls(config, engine, model, initialize_parallel_optimizer(config, engine, model))

    def steps(self, batches: Sequence[Batch], count: int = _STEPS, *, max_norm: float | None = None) -> Run:
        """Train on the same global batch ``count`` times, at a falling learning rate."""
        for _ in range(count):
            own = _share(batches, self.engine)
            done = train_step(self.model, self.optimizer, own, CausalLM(), _falling, self.state, max_norm=max_norm)
            self.losses.append(float(done.loss.loss))
            self.norms.append(float(done.grad_norm))
            self.weight_norms.append(float(self.model.parameter_norm()))
        return self


class TwoTerms:
    """An objective of two terms with different weights, and a metric."""

    def __init__(self, config: object = None) -> None:
        del config  # it has no options

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


def global_batch(seed: int = 0) -> list[Batch]:
    """Return the micro-batches of one global batch, with different numbers of loss tokens."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(_VOCABULARY, (_ROWS, _LENGTH + 1), generator=draws)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=draws) < torch.linspace(0, 0.8, _ROWS)[:, None]] = IGNORE_INDEX
    rows = range(0, _ROWS, _MICRO)
    return [Batch(input_ids=ids[i : i + _MICRO, :-1], labels=labels[i : i + _MICRO]) for i in rows]


def train_on_rank(settings: Settings, overrides: Sequence[str]) -> tuple[list[float], list[float], list[float], bool]:
    """Losses, norms of gradients and of weights, and whether the ranks agree. A function of a pool of ranks."""
    run = Run.begin(settings.config(*overrides), settings.policy).steps(global_batch())
    ranks, place = run.engine.ranks, run.engine.rank_info
    agree = (
        ranks.all_gather_object(ranks.rank) == list(range(ranks.world_size))
        and ranks.world_size == place.world_size
        and ranks.rank == place.rank
        and ranks.any_rank(ranks.rank == 1)
        and ranks.broadcast_object(ranks.rank) == 0
        and run.engine.broadcast_object(f"rank {ranks.rank}") == "rank 0"
        and run.model.data_ranks == place.dp_size
    )
    run.engine.shutdown()
    run.engine.shutdown()
    return run.losses, run.norms, run.weight_norms, agree


class EngineContract:
    """Set :attr:`engine`. Everything else has a default."""

    engine: ClassVar[str]
    """Name of the engine in a configuration."""
    plugins: ClassVar[tuple[str, ...]] = ()
    """Plugin files to load, of an engine that is not installed."""
    accelerator: ClassVar[str] = HOST.type
    """``trainer.accelerator``."""

    def runs(self, capability: str, config: pytest.Config) -> bool:
        """Return whether to try a declared layout of :data:`LAYOUTS` on real ranks in this run of pytest."""
        del capability, config
        return True

    @pytest.fixture
    def settings(self) -> Settings:
        """Under float64 where the engine declares that, so that layouts are compared to the last digits."""
        made = Settings(engine=self.engine, plugins=self.plugins, accelerator=self.accelerator)
        if "dtype:float64" not in _declared(made):
            return made
        numbers: Any = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "float64")
        return replace(made, policy=PrecisionPolicy(name="float64", **numbers))

    @pytest.fixture
    def batches(self) -> list[Batch]:
        """Return one global batch."""
        return global_batch()

    @pytest.fixture
    def run(self, settings: Settings) -> Iterator[Run]:
        """Yield a model and its optimizer in one process."""
        made = Run.begin(settings.config(), settings.policy)
        yield made
        made.engine.shutdown()

    # Training in one process

    @pytest.mark.parametrize("max_norm", [None, 0.05])
    def test_it_trains_as_a_loop_of_plain_torch_does(
        self, run: Run, batches: list[Batch], settings: Settings, max_norm: float | None
    ) -> None:
        """Losses, norms of gradients before clipping, and weights; norms of layers do not decay."""
        run.steps(batches, max_norm=max_norm)
        losses, norms, weights = _by_hand(run.config, settings.policy, batches, max_norm)
        assert run.losses == pytest.approx(losses, rel=_tolerance(settings))
        assert run.norms == pytest.approx(norms, rel=10 * _tolerance(settings))
        found = dict(run.model.named_parameters())
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(_local(found[name]), weight, rtol=1e-4, atol=1e-5, msg=name)

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
        expected = nll + float(torch.stack(squares).sum()) / _ROWS
        assert float(both.loss) == pytest.approx(expected, rel=1e-4)
        assert float(both.metrics["nll"]) == pytest.approx(nll, rel=1e-4)

    def test_evaluation_gives_the_loss_and_changes_nothing(self, run: Run, batches: list[Batch]) -> None:
        """No gradients, no weights."""
        before = _copy(run.model.state_dict())
        evaluated = float(run.model.run_eval(batches, CausalLM()).loss)
        assert all(parameter.grad is None for _, parameter in run.model.named_parameters())
        assert _equal(run.model.state_dict(), before)
        assert float(run.model.run_train(batches, CausalLM()).loss) == pytest.approx(evaluated, rel=1e-4)

    def test_a_step_that_is_not_finite_is_counted_and_leaves_the_weights(self, run: Run, batches: list[Batch]) -> None:
        """The next one updates them."""
        run.steps(batches, 1)
        before, state = _copy(run.model.state_dict()), _copy(run.optimizer.state_dict())
        run.model.run_train(batches, CausalLM())
        norm = run.optimizer.clip_grad_norm(None)
        run.optimizer.reject_unless_finite(torch.full_like(norm, float("nan")), norm)
        run.optimizer.step()
        assert int(run.optimizer.skipped_steps) == 1
        assert _equal(run.model.state_dict(), before)
        assert _equal(run.optimizer.state_dict(), state)
        run.steps(batches, 1)
        assert int(run.optimizer.skipped_steps) == 1
        assert not _equal(run.model.state_dict(), before)

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
        assert logits.shape == (*ids.shape, _VOCABULARY)
        assert not logits.requires_grad
        assert torch.equal(logits, run.model.forward(ids))

    def test_log_probs_are_those_of_the_labels(self, run: Run, batches: list[Batch], settings: Settings) -> None:
        """0 at positions without a label; without a gradient."""
        if "reference" not in _declared(settings):
            pytest.skip("the engine does not declare 'reference'")
        for batch, found in zip(batches, run.model.log_probs(batches), strict=True):
            logits, counts = run.model.forward(batch.input_ids).float().to(HOST), batch.labels != IGNORE_INDEX
            expected = -cross_entropies(logits, batch.labels) * counts
            torch.testing.assert_close(found.float().to(HOST), expected, rtol=1e-4, atol=1e-4)
            assert not found.requires_grad

    # State

    def test_weights_have_the_names_of_the_model(self, run: Run) -> None:
        """Compare the names of ``named_parameters`` and ``state_dict``; fresh weights follow from the seed and the
        names."""
        module = _fresh(run.config, torch.get_default_dtype())
        names = {name for name, _ in module.named_parameters()}
        assert {name for name, _ in run.model.named_parameters()} == names
        assert names <= run.model.state_dict().keys() <= module.state_dict().keys()
        assert run.model.added == frozenset()
        assert run.model.data_ranks == 1
        assert len(run.model.local_modules()) == 1

    def test_weights_that_are_loaded_are_those_that_were_saved(self, run: Run, settings: Settings) -> None:
        """Into a model with others."""
        kept = _copy(run.model.state_dict())
        other = Run.begin(settings.config(), settings.policy, seed=_SEED + 1)
        assert not _equal(other.model.state_dict(), kept)
        other.model.load_state_dict(kept)
        assert _equal(other.model.state_dict(), kept)
        other.engine.shutdown()

    def test_weights_of_another_model_are_refused(self, run: Run) -> None:
        """Missing and extra names, where loading is strict, and other shapes always."""
        kept = _copy(run.model.state_dict())
        name = next(iter(kept))
        others = {key: value for key, value in kept.items() if key != name}
        for wrong in (others, {**kept, "nobody.weight": kept[name]}):
            with pytest.raises(NxdtError):
                run.model.load_state_dict(wrong)
            run.model.load_state_dict(wrong, strict=False)
        with pytest.raises(NxdtError):
            run.model.load_state_dict({**kept, name: kept[name][:1]}, strict=False)

    def test_a_resumed_run_goes_on_as_the_one_that_was_not_stopped(
        self, settings: Settings, batches: list[Batch]
    ) -> None:
        """Bitwise, with weights and optimizer state alone."""
        config = settings.config()
        whole = Run.begin(config, settings.policy).steps(batches, 4)
        begun = Run.begin(config, settings.policy).steps(batches, 2)
        weights, state = _copy(begun.model.state_dict()), _copy(begun.optimizer.state_dict())
        assert all(key.rpartition("/")[0] in weights for key in state)
        resumed = Run.begin(config, settings.policy, seed=_SEED + 1)
        resumed.model.load_state_dict(weights)
        resumed.optimizer.load_state_dict(state)
        assert _equal(resumed.optimizer.state_dict(), state)
        resumed.state.update(begun.state.to_dict())
        resumed.steps(batches, 2)
        assert resumed.losses == whole.losses[2:]
        assert _equal(resumed.model.state_dict(), whole.model.state_dict())
        for run in (whole, begun, resumed):
            run.engine.shutdown()

    # Surroundings

    def test_alone_it_agrees_with_itself_and_is_shut_down_twice(self, run: Run) -> None:
        """``ranks`` gives back what it is given."""
        ranks, place = run.engine.ranks, run.engine.rank_info
        assert (ranks.rank, ranks.world_size, place.rank, place.world_size) == (0, 1, 0, 1)
        assert (place.dp_rank, place.dp_size) == (0, 1)
        assert ranks.broadcast_object("a") == run.engine.broadcast_object("a") == "a"
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
        engine = config.selected("engine").component.load_target()
        if not isinstance(engine, EstimatesRuns):
            pytest.skip("the engine gives no estimate")
        found = engine.estimate(config, run_parts(config))
        assert found.parameters == sum(
            parameter.numel() for parameter in build.model_builder(config).build().parameters()
        )
        assert found.micro_batches == _ROWS // _MICRO

    # What is declared works; what is not declared is refused

    @pytest.mark.parametrize("capability", LAYOUTS)
    def test_a_layout_trains_as_one_process_does_or_is_refused(
        self, settings: Settings, batches: list[Batch], capability: str, pytestconfig: pytest.Config
    ) -> None:
        """Losses, norms of gradients and of weights, equal on all ranks."""
        ranks, overrides = LAYOUTS[capability]
        overrides = (f"trainer.devices={ranks}", *overrides)
        if capability not in _declared(settings):
            _refused(settings, capability, overrides)
            return
        if not self.runs(capability, pytestconfig):
            pytest.skip("this run of pytest leaves the layout out")
        alone = Run.begin(settings.config(), settings.policy).steps(batches)
        alone.engine.shutdown()
        for losses, norms, weight_norms, agree in RankPool(ranks).run(train_on_rank, settings, overrides):
            assert losses == pytest.approx(alone.losses, rel=_tolerance(settings))
            assert norms == pytest.approx(alone.norms, rel=10 * _tolerance(settings))
            assert weight_norms == pytest.approx(alone.weight_norms, rel=_tolerance(settings))
            assert agree

    @pytest.mark.parametrize("capability", _SETTINGS)
    def test_a_setting_is_carried_out_or_refused(
        self, settings: Settings, batches: list[Batch], capability: str
    ) -> None:
        """Recomputation changes no digit; a learning rate of 0 leaves its group; an adapter trains alone."""
        if capability not in _declared(settings):
            _refused(settings, capability, (_SETTINGS[capability],))
            return
        if capability == "compile":
            pytest.skip("compiling takes a compiler and minutes")
        run = Run.begin(settings.config(_SETTINGS[capability]), settings.policy)
        before = _copy(run.model.state_dict())
        run.steps(batches)
        changed = {name for name, value in run.model.state_dict().items() if not _same(value, before[name])}
        if capability == "adapters":
            assert run.model.added == changed == {ADDED}
        elif capability == "param_groups":
            assert before.keys() - changed == {"lm_head.weight"}
        else:
            alone = Run.begin(settings.config(), settings.policy).steps(batches)
            assert run.losses == pytest.approx(alone.losses, rel=1e-6)
            alone.engine.shutdown()
        run.engine.shutdown()

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_precision_trains_or_is_refused(self, settings: Settings, batches: list[Batch], policy: str) -> None:
        """Under a declared one the loss is near that of float32, and falls."""
        named = f"precision.type={policy}"
        try:
            config = settings.config(named)
        except ConfigError as error:
            needed = {problem.capability for problem in error.problems if isinstance(problem, CapabilityMissing)}
            assert needed
            assert not needed & _declared(settings)
            return
        run = Run.begin(config).steps(batches)
        exact = Run.begin(settings.config()).steps(batches, 1)
        assert run.losses[0] == pytest.approx(exact.losses[0], rel=0.02)
        assert run.losses[-1] < run.losses[0]
        wanted = getattr(torch, build.precision(config).parameters)
        if not build.precision(config).master_weights:
            assert all(parameter.dtype == wanted for _, parameter in run.model.named_parameters())
        for each in (run, exact):
            each.engine.shutdown()


def _declared(settings: Settings) -> frozenset[str]:
    return settings.config().selected("engine").component.record.capabilities


def _refused(settings: Settings, capability: str, overrides: Sequence[str]) -> None:
    """The configuration is refused for what the engine does not declare."""
    with pytest.raises(ConfigError) as raised:
        settings.config(*overrides)
    lacks = {problem.capability for problem in raised.value.problems if isinstance(problem, CapabilityMissing)}
    assert lacks, capability
    assert not lacks & _declared(settings)


def _tolerance(settings: Settings) -> float:
    return 1e-7 if settings.policy.parameters == "float64" else 1e-4


def _falling(step: int) -> float:
    return 1 / (1 + step)


def _share(batches: Sequence[Batch], engine: ParallelEngine) -> list[Batch]:
    """This rank's micro-batches of a global batch."""
    own = len(batches) // engine.rank_info.dp_size
    first = engine.rank_info.dp_rank * own
    return list(batches[first : first + own])


def _fresh(config: ResolvedConfig, dtype: torch.dtype) -> nn.Module:
    builder = build.model_builder(config)
    module = builder.build().to(dtype)
    initialize(module.named_parameters(), fresh_rules(builder, dict(module.named_parameters())), _SEED)
    return module


def _by_hand(
    config: ResolvedConfig, policy: PrecisionPolicy, batches: Sequence[Batch], max_norm: float | None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms of gradients, and the weights at the end, of a loop of plain torch."""
    module = _fresh(config, getattr(torch, policy.parameters)).train()
    plan, optim = build.model_builder(config).plan(), config.selected("optimizer").config
    exempt = (*plan.no_weight_decay, *plan.norms)
    groups = [
        {
            "params": [p for name, p in module.named_parameters() if matches_any(exempt, name) is spared],
            "weight_decay": d,
        }
        for spared, d in ((False, optim.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    tokens = sum(float(batch.weight()) for batch in batches)
    losses, norms = [], []
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * _falling(step)
        total = 0.0
        for batch in batches:
            logits = called_with_step(module, StepContext(aux_loss_scale=1 / tokens), batch.input_ids)
            loss, _ = cross_entropy_sum(logits, batch.labels)
            torch.autograd.backward(loss / tokens)
            total += float(loss.detach()) / tokens
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(float(norm))
    return losses, norms, {name: parameter.detach() for name, parameter in module.named_parameters()}


def _local(held: Any) -> torch.Tensor:
    """The elements of a tensor or a piece, on the host."""
    found: torch.Tensor = piece_of(held).tensor if isinstance(held, torch.Tensor) else held.tensor
    return found.detach().to(HOST)


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """One that later steps do not change."""
    return {name: value.detach().clone() for name, value in state.items()}


def _same(left: Any, right: Any) -> bool:
    return torch.equal(_local(left), _local(right))


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)
