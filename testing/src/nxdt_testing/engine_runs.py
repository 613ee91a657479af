"""Runs of the contract of engines: what they save, and that what is declared works and all else is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_testing.contract import copied
from nxdt_testing.ranks import RankPool
from nxdt_testing.runs.layouts import CP, EP, GATHER, PP, SP, TP, UNSHARDED, ZERO3
from nxdt_testing.runs.moe import ADDED
from nxdt_testing.runs.run import SEED, Run, differing, fresh, global_batch, run_config

__all__ = ["LAYOUTS", "POLICIES", "EngineRuns", "Settings", "falling", "steps"]

VOCABULARY, MICRO, STEPS = 64, 2, 3
_STRATEGY = "distributed_strategy"

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "dp": (2, (UNSHARDED,)),
    "zero1": (2, (f"{_STRATEGY}.zero_stage=1",)),
    "zero2": (2, (f"{_STRATEGY}.zero_stage=2",)),
    "zero3": (2, (ZERO3,)),
    "dp_replicate": (4, (f"{_STRATEGY}.dp_replicate=2",)),
    "tp": (2, (TP,)),
    "sp": (2, (TP, SP)),
    "pp:1f1b": (2, (PP,)),
    "pp:interleaved": (2, (PP, f"{_STRATEGY}.virtual_pipeline_model_parallel_size=2")),
    "pp:zbv": (2, (PP, f"{_STRATEGY}.pipeline_schedule=zbv")),
    "cp": (2, (CP, UNSHARDED)),
    "cp:ring": (2, (CP, UNSHARDED, f"{_STRATEGY}.context_parallel_method=ring")),
    "cp:gather": (2, (CP, UNSHARDED, GATHER)),
    "ep": (2, (EP,)),
}
"""Name of a layout → ranks, and the overrides that select it."""

_SETTINGS = {
    "recompute": "model.activations_checkpoint_granularity=full",
    "compile": "model.compile=true",
    "param_groups": "model.optim.param_groups=[{params: 'lm_head.*', lr: 0.0}]",
    "adapters": "adapter.name=engine-contract",
}
"""Capability → an override of a run of one process that needs it."""

POLICIES = ("mixed_precision", "mixed_precisionSR", "bf16SR", "autocast")
"""Values of ``precision.type``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings with which each rank builds the same run."""

    engine: str
    plugins: tuple[str, ...] = ()
    accelerator: str = HOST.type
    policy: PrecisionPolicy | None = field(default_factory=lambda: PrecisionPolicy(name="fp32"))
    """Precision policy; None: that of the configuration."""

    @cache  # noqa: B019
    def config(self, *overrides: str) -> ResolvedConfig:
        """Return the run of the contract under this engine, loaded once: most tests ask for the same."""
        return run_config(
            *overrides,
            plugins=self.plugins,
            parallel_engine={"name": self.engine},
            trainer={"max_steps": STEPS, "accelerator": self.accelerator},
            data={"global_batch_size": 4 * MICRO, "micro_batch_size": MICRO},
            model={"optim": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "sched": {"name": "constant"}}},
        )

    def run(self, *overrides: str, seed: int = SEED) -> Run:
        """Start the engine and build."""
        return Run(self.config(*overrides), policy=self.policy, seed=seed)

    @property
    def tolerance(self) -> float:
        """Return how far losses may differ, relative."""
        return 1e-7 if self.policy is not None and self.policy.parameters == "float64" else 1e-4


def falling(step: int) -> float:
    """Return the factor of the learning rate at a step."""
    return 1 / (1 + step)


def steps(run: Run, batches: Sequence[Batch], count: int = STEPS, *, max_norm: float | None = None) -> Run:
    """Train on the same global batch ``count`` times, at a falling learning rate."""
    return run.steps(batches, count, factor=falling, max_norm=max_norm)


def train_on_rank(settings: Settings, overrides: Sequence[str]) -> tuple[list[float], list[float], list[float], bool]:
    """Losses, norms of gradients and of weights, and whether the ranks agree. A function of a pool of ranks."""
    with settings.run(*overrides) as run:
        steps(run, global_batch(VOCABULARY, micro=MICRO))
        ranks, place = run.engine.ranks, run.engine.rank_info
        agree = (
            ranks.all_gather_object(ranks.rank) == list(range(ranks.world_size))
            and ranks.world_size == place.world_size
            and ranks.rank == place.rank
            and ranks.any_rank(ranks.rank == 1)
            and ranks.broadcast_object(ranks.rank) == 0
            and ranks.broadcast_object(f"rank {ranks.rank}") == "rank 0"
            and run.model.data_ranks == place.dp_size
        )
        run.engine.shutdown()
    return run.losses, run.norms, run.weight_norms, agree


class EngineRuns:
    """The tests of what an engine saves, and of what its record declares."""

    def runs(self, layout: str, config: pytest.Config) -> bool:
        """Return whether to try a layout of :data:`LAYOUTS` on real ranks in this run of pytest."""
        del layout, config
        return True

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_layout_trains_as_one_process_does_or_is_refused(
        self, settings: Settings, batches: list[Batch], layout: str, pytestconfig: pytest.Config
    ) -> None:
        """Losses, norms of gradients and of weights, equal on all ranks."""
        ranks, overrides = LAYOUTS[layout]
        overrides = (f"trainer.devices={ranks}", *overrides)
        if _is_refused(settings, *overrides):
            return
        if not self.runs(layout, pytestconfig):
            pytest.skip("this run of pytest leaves the layout out")
        with settings.run() as run:
            alone = steps(run, batches)
        for losses, norms, weight_norms, agree in RankPool(ranks, lasting=True).run(train_on_rank, settings, overrides):
            assert losses == pytest.approx(alone.losses, rel=settings.tolerance)
            assert norms == pytest.approx(alone.norms, rel=10 * settings.tolerance)
            assert weight_norms == pytest.approx(alone.weight_norms, rel=settings.tolerance)
            assert agree

    @pytest.mark.parametrize("capability", _SETTINGS)
    def test_a_setting_is_carried_out_or_refused(
        self, settings: Settings, batches: list[Batch], capability: str
    ) -> None:
        """Recomputation changes no digit; a learning rate of 0 leaves its group; an adapter trains alone."""
        if _is_refused(settings, _SETTINGS[capability]):
            return
        if capability == "compile":
            pytest.skip("compiling takes a compiler and minutes")
        with settings.run(_SETTINGS[capability]) as run:
            before = copied(run.model.state_dict())
            steps(run, batches)
            changed = set(differing(run.model.state_dict(), before))
            if capability == "adapters":
                assert run.model.added == changed == {ADDED}
            elif capability == "param_groups":
                assert before.keys() - changed == {"lm_head.weight"}
            else:
                with settings.run() as alone:
                    assert run.losses == pytest.approx(steps(alone, batches).losses, rel=1e-6)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_precision_trains_or_is_refused(self, settings: Settings, batches: list[Batch], policy: str) -> None:
        """The loss is near that of float32, and falls."""
        named = f"precision.type={policy}"
        if _is_refused(settings, named):
            return
        config = settings.config(named)
        with replace(settings, policy=None).run(named) as run, replace(settings, policy=None).run() as exact:
            steps(run, batches)
            assert run.losses[0] == pytest.approx(steps(exact, batches, 1).losses[0], rel=0.02)
            assert run.losses[-1] < run.losses[0]
            wanted = getattr(torch, build.precision(config).parameters)
            if not build.precision(config).master_weights:
                assert all(parameter.dtype == wanted for _, parameter in run.model.named_parameters())

    def test_weights_have_the_names_of_the_model(self, run: Run) -> None:
        """Compare the names of ``named_parameters`` and ``state_dict``; fresh weights follow from the seed and the
        names."""
        module = fresh(build.model_builder(run.config))
        names = {name for name, _ in module.named_parameters()}
        assert {name for name, _ in run.model.named_parameters()} == names
        assert names <= run.model.state_dict().keys() <= module.state_dict().keys()
        assert run.model.added == frozenset()
        assert run.model.data_ranks == 1
        assert len(run.model.local_modules()) == 1

    def test_weights_that_are_loaded_are_those_that_were_saved(self, run: Run, settings: Settings) -> None:
        """Into a model with others."""
        saved = copied(run.model.state_dict())
        with settings.run(seed=SEED + 1) as other:
            assert differing(other.model.state_dict(), saved)
            other.model.load_state_dict(saved)
            assert not differing(other.model.state_dict(), saved)

    def test_weights_of_another_model_are_refused(self, run: Run) -> None:
        """Missing and extra names, where loading is strict, and other shapes always."""
        unchanged = copied(run.model.state_dict())
        name = next(iter(unchanged))
        others = {key: value for key, value in unchanged.items() if key != name}
        for wrong in (others, {**unchanged, "nobody.weight": unchanged[name]}):
            with pytest.raises(NxdtError):
                run.model.load_state_dict(wrong)
            run.model.load_state_dict(wrong, strict=False)
        with pytest.raises(NxdtError):
            run.model.load_state_dict({**unchanged, name: unchanged[name][:1]}, strict=False)

    def test_a_resumed_run_continues_as_the_one_that_was_not_stopped(
        self, settings: Settings, batches: list[Batch]
    ) -> None:
        """Bitwise, with weights and optimizer state alone."""
        with settings.run() as whole, settings.run() as begun, settings.run(seed=SEED + 1) as resumed:
            steps(whole, batches, 4)
            steps(begun, batches, 2)
            weights, state = copied(begun.model.state_dict()), copied(begun.optimizer.state_dict())
            assert all(key.rpartition("/")[0] in weights for key in state)
            resumed.model.load_state_dict(weights)
            resumed.optimizer.load_state_dict(state)
            assert not differing(resumed.optimizer.state_dict(), state)
            resumed.state.update(begun.state.to_dict())
            steps(resumed, batches, 2)
            assert resumed.losses == whole.losses[2:]
            assert not differing(resumed.model.state_dict(), whole.model.state_dict())


def _is_refused(settings: Settings, *overrides: str) -> bool:
    """Return whether the configuration is refused for what the engine does not declare or its rules find."""
    record = settings.config().selected("engine").component.record
    try:
        settings.config(*overrides)
    except ConfigError as refused:
        problems = refused.problems
    else:
        return False
    lacks = {problem.capability for problem in problems if isinstance(problem, CapabilityMissing)}
    assert lacks or getattr(record, "rules", None) is not None, problems
    assert not lacks & record.capabilities
    return True
