"""Trains a model in a layout on real ranks and in one process, and says where the two differ.

For :class:`nxdt_testing.model_contract.ModelContract`. Everything is computed in float64 with plain gradient
descent, so that what differs is the model or its plan, and never rounding.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import piece_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.plugins import UnknownComponent
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.registry import RegisteredComponent
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.parallel.piece import Box
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_core.train.causal_lm import CausalLM
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step
from nxdt_core.train.weights.saved_optimizer import check_shared_state
from nxdt_testing.processes.rank_worker import import_module
from nxdt_testing.ranks import RankPool, RanksFailed

__all__ = [
    "LAYOUTS",
    "ComponentParts",
    "Layout",
    "OptimizerParts",
    "compare",
    "component_of",
    "global_batch",
    "has_lora",
    "planned_capabilities",
    "run_config",
]

_SEED, _ROWS, _MICRO, _LENGTH, _STEPS = 11, 4, 1, 16, 2
_NUMBERS: Any = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "float64")
_LOSS, _METRIC, _UPDATE, _FLOOR = 1e-6, 1e-5, 1e-3, 1e-8
"""Allowed differences: of a loss and of a metric, relative; of an update, relative to the largest element of the
parameter's; and to the largest of all. Some models compute norms in float32. A mistake changes updates by percents."""
_STRATEGY = "distributed_strategy"
_TP, _PP = f"{_STRATEGY}.tensor_model_parallel_size=2", f"{_STRATEGY}.pipeline_model_parallel_size=2"
_CP, _EP = f"{_STRATEGY}.context_parallel_size=2", f"{_STRATEGY}.expert_model_parallel_size=2"
_SP, _ZERO3 = f"{_STRATEGY}.sequence_parallel=true", f"{_STRATEGY}.zero_stage=3"
_GATHER = f"{_STRATEGY}.context_parallel_method=gather"
_UNSHARDED = f"{_STRATEGY}.zero1=false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout and what a record must declare for it."""

    needs: frozenset[str]
    """Capabilities of a model."""
    settings: tuple[str, ...]
    """Overrides of a configuration."""
    ranks: int = 2
    documents: bool = False
    """Whether rows hold several documents."""
    lora: bool = False
    """Whether the model is adapted by ``nxdt-plugin-lora``."""
    exhaustive: bool = False
    """Whether it is left out unless all cases are wanted: others show nearly the same."""


def _layout(needs: str, *settings: str, **others: Any) -> Layout:
    return Layout(needs=frozenset(needs.split()), settings=settings, **others)


LAYOUTS: Mapping[str, Layout] = {
    "tp": _layout("tp", _TP, documents=True),
    "tp-sp": _layout("tp sp", _TP, _SP),
    "pp": _layout("pp", _PP),
    "cp": _layout("cp", _CP, _UNSHARDED, documents=True),
    "ep": _layout("ep", _EP),
    "zero3": _layout("", _ZERO3),
    "lora-tp": _layout("lora tp", _TP, lora=True),
    "tp-sp-documents": _layout("tp sp", _TP, _SP, documents=True, exhaustive=True),
    "pp-documents": _layout("pp", _PP, documents=True, exhaustive=True),
    "cp-gather": _layout("cp", _CP, _UNSHARDED, _GATHER, exhaustive=True),
    "lora-zero3": _layout("lora", _ZERO3, lora=True, exhaustive=True),
    "lora-pp": _layout("lora pp", _PP, lora=True, exhaustive=True),
    "tp-pp": _layout("tp pp", _TP, _PP, ranks=4, exhaustive=True),
    "tp-cp": _layout("tp cp", _TP, _CP, _UNSHARDED, ranks=4, exhaustive=True),
    "tp-ep": _layout("tp ep", _TP, _EP, ranks=4, exhaustive=True),
    "tp-zero3": _layout("tp", _TP, _ZERO3, ranks=4, exhaustive=True),
}
"""By name: the layouts in which a model is compared with a single process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What some steps on a rank gave."""

    losses: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]
    updates: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]
    """By parameter: where the elements of this rank begin, and how they changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParts:
    """An optimizer in place of gradient descent."""

    factory: OptimizerFactory
    """Importable, so that ranks can unpickle it."""
    section: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentParts:
    """An objective or an adapter: its target, importable so that ranks can unpickle it, and its section."""

    factory: Callable[[Any], Any]
    section: Any

    def build(self) -> Any:
        """Return the component."""
        return self.factory(self.section)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is trained with, instead of the defaults."""

    optimizer: OptimizerParts | None = None
    objective: ComponentParts | None = None
    adapter: ComponentParts | None = None
    batches: Sequence[Batch] | None = None

    @property
    def homes(self) -> list[tuple[str, str]]:
        """Modules and files of their classes and functions."""
        given = [each for each in (self.optimizer, self.objective, self.adapter) if each is not None]
        return [_home(defined) for each in given for defined in (each.factory, type(each.section))]


def compare(
    builder: ModelBuilder,
    layout: Layout,
    optimizer: OptimizerParts | None = None,
    *,
    objective: ComponentParts | None = None,
    adapter: ComponentParts | None = None,
    batches: Sequence[Batch] | None = None,
) -> list[str]:
    """Train in one process and in ``layout``.

    Args:
        builder: of the model.
        layout: of the ranks.
        optimizer: in place of gradient descent.
        objective: in place of next-token prediction.
        adapter: changes the model.
        batches: micro-batches of the global batch, in place of made-up ones.

    Returns:
        What differs, one sentence each; nothing where all is equal.
    """
    parts = _Parts(optimizer=optimizer, objective=objective, adapter=adapter, batches=batches)
    alone = _train(builder, replace(layout, ranks=1), (), parts)
    files = [_home(type(builder)), *parts.homes]
    try:
        found = RankPool(layout.ranks).run(train_on_rank, files, pickle.dumps((builder, parts)), layout)
    except RanksFailed as failed:
        return [f"it cannot be trained: {failed}"]
    problems = [each for each in found if isinstance(each, str)]
    if problems:
        return [f"it cannot be trained: {problems[0]}"]
    return [
        *_losses_that_differ(alone, found),
        *_metrics_that_differ(alone, found),
        *_updates_that_differ(alone, found),
    ]


def train_on_rank(files: Sequence[tuple[str, str]], pickled: bytes, layout: Layout) -> Trained | str:
    """Train on one rank of a pool; a text where an error of ours says why that is not possible.

    Builder and parts come pickled, with the files of their classes: these may be a test's, which is in no package.
    """
    for module, file in files:
        import_module(module, file)
    builder, parts = pickle.loads(pickled)
    try:
        return _train(builder, layout, (f"trainer.devices={layout.ranks}", *layout.settings), parts)
    except NxdtError as error:
        return str(error)


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
    found = {
        "tp": bool(plan.tensor),
        "sp": bool(plan.sequence_norms) and "vocab_head" in styles,
        "pp": plan.pipeline is not None,
        "cp": bool(plan.attention_cores),
        "ep": bool(plan.experts.modules),
    }
    return frozenset(name for name, has in found.items() if has and name not in plan.refused)


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


def _home(defined: Any) -> tuple[str, str]:
    """Name and file of the module that defines a class or function."""
    module = str(defined.__module__)
    return module, getattr(sys.modules.get(module), "__file__", None) or ""


def _train(builder: ModelBuilder, layout: Layout, settings: Sequence[str], parts: _Parts) -> Trained:
    length = min(_LENGTH, builder.max_sequence_length or _LENGTH)
    config = run_config(length, settings)
    engine = build.engine(config)
    engine.start()
    precision = PrecisionPolicy(name="float64", **_NUMBERS)
    adapters = [_lora(config)] if layout.lora else [] if parts.adapter is None else [parts.adapter.build()]
    model = engine.initialize_model(builder, precision=precision, seed=_SEED, adapters=adapters)
    for adapter in adapters if parts.adapter is not None else ():
        adapter.begin(model, config, engine.ranks)
    if parts.optimizer is None:
        optimizer = initialize_parallel_optimizer(config, engine, model)
    else:
        factory, section = parts.optimizer.factory, parts.optimizer.section
        optimizer = engine.initialize_optimizer(model, factory, section, decay_norms=False)
    objective = CausalLM() if parts.objective is None else parts.objective.build()
    before = _pieces(model.state_dict())
    batches = parts.batches or global_batch(builder.vocab_size, length, documents=layout.documents)
    own = len(batches) // engine.rank_info.dp_size
    first = engine.rank_info.dp_rank * own
    losses, metrics, state = [], [], TrainState()
    for _ in range(_STEPS):
        done = train_step(
            model, optimizer, batches[first : first + own], objective, lambda step: 1.0, state, max_norm=None
        )
        losses.append(float(done.loss.loss))
        metrics.append({} if parts.objective is None else {k: float(v) for k, v in done.loss.metrics.items()})
    if parts.optimizer is not None:
        check_shared_state(optimizer.state_dict(), model.state_dict(), engine.ranks)
    after = _pieces(model.state_dict())
    engine.shutdown()
    updates = {name: (offsets, value - before[name][1]) for name, (offsets, value) in after.items()}
    return Trained(losses=tuple(losses), metrics=tuple(metrics), updates=updates)


def run_config(length: int, settings: Sequence[str]) -> ResolvedConfig:
    """Return a run of a model that declares every capability: contracts say which layouts apply to theirs."""
    run = {
        "name": "model-contract",
        "plugins": {"local": [str(Path(__file__).with_name("engine_parts.py"))]},
        "trainer": {"max_steps": _STEPS, "accelerator": HOST.type},
        "data": {"name": "none", "seq_length": length, "global_batch_size": _ROWS, "micro_batch_size": _MICRO},
        "model": {
            "name": "engine-contract",
            "num_layers": 4,
            "optim": {"name": "sgd", "lr": 0.5, "sched": {"name": "constant"}},
        },
        "precision": {"type": "fp32"},
    }
    return load(run, settings)


def _lora(config: ResolvedConfig) -> Adapter:
    """LoRA without dropout."""
    component = config.kernel.registry.get("adapter", "lora")
    section: Any = component.load_config()
    adapter: Adapter = component.load_target()(section(lora_rank=2, lora_dropout=0.0))
    return adapter


def global_batch(vocabulary: int, length: int, *, documents: bool) -> list[Batch]:
    """Return micro-batches of one row; where rows hold two documents, these end at different places."""
    ids = torch.randint(vocabulary, (_ROWS, length + 1), generator=torch.Generator().manual_seed(_SEED))
    batches = []
    for row in range(0, _ROWS, _MICRO):
        rows = ids[row : row + _MICRO]
        batch = Batch(input_ids=rows[:, :-1], labels=rows[:, 1:].clone())
        if documents:
            ends = min(length - 1, 3 + 2 * row)
            numbers = (torch.arange(length) >= ends).long().expand(_MICRO, -1)
            places = torch.arange(length) - numbers * ends
            batch = replace(batch, document_ids=numbers, position_ids=places)
        batches.append(batch)
    return batches


def _pieces(state: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Where this rank's elements begin, and a copy of them."""
    pieces = {name: piece_of(held, name) for name, held in state.items()}
    return {name: (piece.box.offsets, piece.tensor.detach().clone()) for name, piece in pieces.items()}


def _losses_that_differ(alone: Trained, found: Iterable[Trained]) -> list[str]:
    for each in found:
        for step, (loss, expected) in enumerate(zip(each.losses, alone.losses, strict=True), start=1):
            if not abs(loss - expected) <= _LOSS * abs(expected):
                return [f"the loss of step {step} is {loss:.8g}, and {expected:.8g} in one process"]
    return []


def _metrics_that_differ(alone: Trained, found: Iterable[Trained]) -> list[str]:
    for each in found:
        for step, (metrics, expected) in enumerate(zip(each.metrics, alone.metrics, strict=True), start=1):
            for name, value in expected.items():
                got = metrics.get(name, float("nan"))
                if not abs(got - value) <= _METRIC * max(abs(value), 1.0):
                    return [f"the metric {name!r} of step {step} is {got:.8g}, and {value:.8g} in one process"]
    return []


def _updates_that_differ(alone: Trained, found: Iterable[Trained]) -> list[str]:
    """Name the parameters that are updated otherwise, those that differ most first."""
    whole = {name: value for name, (_, value) in alone.updates.items()}
    floor = _FLOOR * max((float(value.abs().max()) for value in whole.values() if value.numel()), default=0.0)
    worst: dict[str, float] = {}
    for each in found:
        for name, (offsets, update) in each.updates.items():
            if update.numel() == 0:
                continue
            expected = whole[name][Box(offsets, tuple(update.shape)).within(Box.whole(tuple(whole[name].shape)))]
            size = max(_UPDATE * float(whole[name].abs().max()), floor)
            worst[name] = max(worst.get(name, 0.0), float((update - expected).abs().max()) / size)
    wrong = sorted((name for name, share in worst.items() if not share <= 1), key=lambda name: -worst[name])
    missing = sorted(whole.keys() - {name for each in found for name in each.updates})
    said = [f"no rank holds {', '.join(missing)}"] if missing else []
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        said.append(f"these parameters are updated otherwise: {', '.join(wrong[:4])}{more}")
    return said
