"""Trains a model in a layout on real ranks and in one process, and says where the two differ.

For contracts of models, and of what models are trained with. Everything is computed in float64, by default with plain
gradient descent, so that what differs is the component or the plan, and never rounding.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

import pytest
import torch

from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.errors.plugins import UnknownComponent
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.registry import RegisteredComponent
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.tensor_shards import TensorSlice
from nxdt_core.train.weights.saved_config import check_shared_state
from nxdt_testing.contract import difference
from nxdt_testing.processes.rank_worker import import_module
from nxdt_testing.ranks import RankPool, RanksFailed
from nxdt_testing.runs.run import EXACT, LENGTH, Parts, Run, global_batch, run_config

__all__ = ["LAYOUTS", "Layout", "TriesLayouts", "compare", "component_of", "has_lora", "planned_capabilities"]

_STEPS = 2
_LOSS, _METRIC, _UPDATE, _FLOOR = 1e-6, 1e-5, 1e-3, 1e-8
"""Allowed differences: of a loss and of a metric, relative; of an update, relative to the largest element of the
parameter's; and to the largest of all. Some models compute norms in float32. A mistake changes updates by percents."""
_STRATEGY = "distributed_strategy"
TP, PP = f"{_STRATEGY}.tensor_model_parallel_size=2", f"{_STRATEGY}.pipeline_model_parallel_size=2"
CP, EP = f"{_STRATEGY}.context_parallel_size=2", f"{_STRATEGY}.expert_model_parallel_size=2"
SP, ZERO3 = f"{_STRATEGY}.sequence_parallel=true", f"{_STRATEGY}.zero_stage=3"
GATHER = f"{_STRATEGY}.context_parallel_method=gather"
UNSHARDED = f"{_STRATEGY}.zero1=false"


_run_config = cache(run_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout and what a record must declare for it."""

    needs: frozenset[str]
    """Capabilities of a model."""
    settings: tuple[str, ...]
    """Overrides of a configuration."""
    ranks: int = 2
    documents: bool = False
    """True if rows hold several documents."""
    lora: bool = False
    """True if the model is adapted by ``nxdt-plugin-lora``."""
    exhaustive: bool = False
    """True for a layout that only a run of all samples includes, since others show nearly the same."""


def _layout(needs: str, *settings: str, **others: Any) -> Layout:
    return Layout(needs=frozenset(needs.split()), settings=settings, **others)


LAYOUTS: Mapping[str, Layout] = {
    "tp": _layout("tp", TP, documents=True),
    "tp-sp": _layout("tp sp", TP, SP),
    "pp": _layout("pp", PP),
    "cp": _layout("cp", CP, UNSHARDED, documents=True),
    "ep": _layout("ep", EP),
    "zero3": _layout("", ZERO3),
    "lora-tp": _layout("lora tp", TP, lora=True),
    "tp-sp-documents": _layout("tp sp", TP, SP, documents=True, exhaustive=True),
    "pp-documents": _layout("pp", PP, documents=True, exhaustive=True),
    "cp-gather": _layout("cp", CP, UNSHARDED, GATHER, exhaustive=True),
    "lora-zero3": _layout("lora", ZERO3, lora=True, exhaustive=True),
    "lora-pp": _layout("lora pp", PP, lora=True, exhaustive=True),
    "tp-pp": _layout("tp pp", TP, PP, ranks=4, exhaustive=True),
    "tp-cp": _layout("tp cp", TP, CP, UNSHARDED, ranks=4, exhaustive=True),
    "tp-ep": _layout("tp ep", TP, EP, ranks=4, exhaustive=True),
    "tp-zero3": _layout("tp", TP, ZERO3, ranks=4, exhaustive=True),
}
"""Layouts by name, in which a model is compared with a single process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Result of some steps on a rank."""

    losses: Mapping[int, float]
    """Losses by step."""
    metrics: Mapping[str, Mapping[int, float]]
    """Metrics by name and step."""
    updates: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]
    """Update of each parameter: where the elements of this rank begin, and how they changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Model and layout to train, and replacements of the defaults."""

    builder: ModelBuilder
    layout: Layout
    optimizer: Parts | None = None
    objective: Parts | None = None
    adapter: Parts | None = None
    batches: Sequence[Batch] | None = None

    def train(self, settings: Sequence[str]) -> Trained:
        """Take the steps in this process."""
        length = min(LENGTH, self.builder.max_sequence_length or LENGTH)
        config = _run_config(f"data.seq_length={length}", *settings)
        adapters = [] if self.adapter is None else [self.adapter.factory(self.adapter.section)]
        if self.layout.lora:
            lora = config.kernel.registry.get("adapter", "lora")
            section: Any = lora.load_config()
            adapters.append(lora.load_target()(section(lora_rank=2, lora_dropout=0.0)))
        objective = None if self.objective is None else self.objective.factory(self.objective.section)
        batches = self.batches or global_batch(self.builder.vocab_size, length, documents=self.layout.documents)
        with Run(config, builder=self.builder, policy=EXACT, adapters=adapters, optimizer=self.optimizer) as run:
            run.steps(batches, _STEPS, objective=objective)
            state = run.model.state_dict()
            if self.optimizer is not None:
                check_shared_state(run.optimizer.state_dict(), state, run.engine.ranks)
            places = {name: local_shard_of(value, name).region.offsets for name, value in state.items()}
            moved = run.moved()
        names = [] if objective is None else run.metrics[0]
        return Trained(
            losses=dict(enumerate(run.losses, start=1)),
            metrics={name: dict(enumerate((metric[name] for metric in run.metrics), start=1)) for name in names},
            updates={name: (places[name], change) for name, change in moved.items()},
        )


def compare(
    builder: ModelBuilder, layout: Layout, *, rtol: float = _UPDATE, timeout_s: float = 60.0, **parts: Any
) -> list[str]:
    """Train in one process and in ``layout``.

    Args:
        builder: of the model.
        layout: of the ranks.
        rtol: allowed difference of an update, relative to the largest element of the parameter's; that of losses
            grows with it.
        timeout_s: for the steps on ranks.
        parts: ``optimizer``, ``objective`` and ``adapter``, each :class:`nxdt_testing.runs.run.Parts`, in place of
            gradient descent, next-token prediction and none; ``batches``, micro-batches in place of made-up ones.

    Returns:
        What differs, one sentence each; nothing where all is equal.
    """
    work = _Work(builder=builder, layout=layout, **parts)
    single = replace(layout, needs=frozenset(), settings=(), ranks=1, exhaustive=False)
    alone = _train_alone(pickle.dumps(replace(work, layout=single)))
    # Modules and files of the classes and functions of the work, which may be a test's, in no package.
    parts_given = [part for part in (work.optimizer, work.objective, work.adapter) if part is not None]
    defined = [type(builder), *(item for part in parts_given for item in (part.factory, type(part.section)))]
    modules = [str(item.__module__) for item in defined]
    homes = [(name, getattr(sys.modules.get(name), "__file__", None) or "") for name in modules]
    try:
        ranks = RankPool(layout.ranks, lasting=True).run(train_on_rank, homes, pickle.dumps(work), timeout_s=timeout_s)
    except RanksFailed as failed:
        return [f"it cannot be trained: {failed}"]
    where = "in one process"
    differences = [difference(item.losses, alone.losses, where, rtol=_LOSS * rtol / _UPDATE) for item in ranks]
    for name, wanted in alone.metrics.items():
        of = f"metric {name!r}"
        numbers = [item.metrics.get(name, {}) for item in ranks]
        differences += [difference(number, wanted, where, of=of, rtol=_METRIC, atol=_METRIC) for number in numbers]
    return [*[item for item in differences if item][:1], *_updates_that_differ(alone, ranks, rtol)]


@lru_cache(maxsize=8)
def _train_alone(pickled: bytes) -> Trained:
    """Train in this process; once for layouts with the same batches, which come one after the other."""
    work: _Work = pickle.loads(pickled)
    return work.train(())


def train_on_rank(files: Sequence[tuple[str, str]], pickled: bytes) -> Trained:
    """Train on one rank of a pool. The work comes pickled, with the files of its classes."""
    for module, file in files:
        import_module(module, file)
    work: _Work = pickle.loads(pickled)
    return work.train((f"trainer.devices={work.layout.ranks}", *work.layout.settings))


class TriesLayouts:
    """A contract whose component is trained in layouts."""

    exhaustive: ClassVar[Collection[str]] = ()
    """Layouts that are left out, unless the option ``--samples`` of pytest is ``all``."""
    hangs_s: ClassVar[float] = 60.0
    """Seconds that the steps in a layout may take: ranks that do not call the same collectives wait for each other."""

    def tries(self, layout: str, config: pytest.Config) -> bool:
        """Return whether this run of pytest trains in ``layout``, a key of :data:`LAYOUTS`."""
        return layout not in self.exhaustive or config.getoption("samples") == "all"

    def assert_agrees(
        self, layout: str, builder: ModelBuilder, config: pytest.Config, advice: str = "", **parts: Any
    ) -> None:
        """Fail with ``advice`` where :func:`compare` finds differences; skip what is not tried."""
        if not self.tries(layout, config):
            pytest.skip(f"this run of pytest leaves {layout} out; run all with --samples=all")
        wrong = compare(builder, LAYOUTS[layout], timeout_s=self.hangs_s, **parts)
        settings = " ".join(LAYOUTS[layout].settings)
        differences = "; ".join(wrong)  # behind the advice, since the stacks of ranks that hang are long
        assert not wrong, f"in the layout {settings} it does not train as in one process. {advice}\n{differences}"


def component_of(builder: ModelBuilder) -> RegisteredComponent | None:
    """Return the installed component whose target is the class of ``builder``; None where there is none."""
    module = type(builder).__module__.partition(".")[0]
    for component in _kernel().registry.all("model"):
        if component.record.target.partition(".")[0] == module and component.load_target() is type(builder):
            return component
    return None


def planned_capabilities(plan: ParallelPlan) -> frozenset[str]:
    """Return the capabilities of a model that ``plan`` has entries for."""
    styles = set(plan.tensor.values())
    planned = {
        "tp": bool(plan.tensor),
        "sp": bool(plan.tensor_blocks) and bool(styles & {"vocab_head", "score_head"}),
        "pp": plan.pipeline is not None,
        "cp": bool(plan.attention_cores),
        "ep": bool(plan.experts.modules),
    }
    return frozenset(name for name, has in planned.items() if has and name not in plan.refused)


def has_lora() -> bool:
    """Return whether an adapter ``lora`` is installed."""
    try:
        _kernel().registry.get("adapter", "lora")
    except UnknownComponent:
        return False
    return True


@cache
def _kernel() -> Kernel:
    return Kernel.start()


def _updates_that_differ(alone: Trained, ranks: Iterable[Trained], rtol: float) -> list[str]:
    """Name the parameters that are updated otherwise, those that differ most first."""
    whole = {name: value for name, (_, value) in alone.updates.items()}
    floor = _FLOOR * max((float(value.abs().max()) for value in whole.values() if value.numel()), default=0.0)
    worst: dict[str, float] = {}
    for rank in ranks:
        for name, (offsets, update) in rank.updates.items():
            if update.numel() == 0:
                continue
            expected = whole[name][
                TensorSlice(offsets, tuple(update.shape)).within(TensorSlice.whole(tuple(whole[name].shape)))
            ]
            size = max(rtol * float(whole[name].abs().max()), floor)
            worst[name] = max(worst.get(name, 0.0), float((update - expected).abs().max()) / size)
    wrong = sorted((name for name, share in worst.items() if not share <= 1), key=lambda name: -worst[name])
    missing = sorted(whole.keys() - {name for rank in ranks for name in rank.updates})
    differences = [f"no rank holds {', '.join(missing)}"] if missing else []
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        differences.append(f"these parameters are updated otherwise: {', '.join(wrong[:4])}{more}")
    return differences
