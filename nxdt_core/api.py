"""Everything that a plugin's entry module may import: the hook marker and the component records.

Neither torch nor any other heavy library is imported here, so that listing plugins stays cheap. The base
class of each kind is in :mod:`nxdt_core.protocols`, one file per kind.

A whole plugin's entry module::

    from nxdt_core.api import Component, hookimpl

    @hookimpl
    def nxdt_optimizers():
        return [
            Component(
                name="lion",
                target="my_plugin.lion:build_lion",
                config="my_plugin.config:LionConfig",
                summary="Lion (Chen et al. 2023, arXiv:2302.06675)",
            )
        ]

and in its ``pyproject.toml``::

    [project.entry-points."nxdt.plugins"]
    lion = "my_plugin"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import pluggy

from nxdt_core._version import __version__
from nxdt_core.callback import Callback, Run
from nxdt_core.errors.plugins import BadComponentRecord

__all__ = [
    "CAPABILITIES",
    "ENTRY_POINT_GROUP",
    "KINDS",
    "PROJECT",
    "AdapterComponent",
    "Callback",
    "CliCommand",
    "Component",
    "ConfigFinding",
    "EngineComponent",
    "Kind",
    "MigrationComponent",
    "ModelComponent",
    "Run",
    "StoreComponent",
    "__version__",
    "hookimpl",
]

PROJECT = "nxdt"
"""The pluggy project name that hook markers carry."""

ENTRY_POINT_GROUP = "nxdt.plugins"
"""The one entry-point group through which plugins are found."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a function of a plugin as the implementation of the hook of the same name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_COMMAND = re.compile(f"{_NAME.pattern}( {_NAME.pattern})?")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


CAPABILITIES: Final[Mapping[str, Mapping[str, str]]] = {
    "engine": {
        "dp": "trains on several data parallel ranks, which read different samples",
        "tp": "shards the matrices of layers over ranks",
        "pp": "distributes layers over pipeline stages on several ranks",
        "cp": "shards sequences over ranks",
        "ep": "distributes experts over ranks",
        "adapters": "applies adapters to the model before it is laid out, and trains what they added",
        "frozen_model": "runs a second model, which does not train, next to the one that does",
        "recompute": "recomputes activations in backward",
        "compile": "compiles the model with torch.compile",
        "param_groups": "applies model.optim.param_groups",
        "precision": "computes in other dtypes than float32",
        "xla": "reads the settings of the XLA runtime",
    },
    "model": {
        "tp": "its plan shards the matrices of layers",
        "sp": "its plan shards activations between tensor parallel layers along the sequence",
        "pp": "its plan cuts the model into pipeline stages",
        "cp": "its attention runs on shards of a sequence",
        "ep": "it has experts that its plan distributes over ranks",
        "lora": "its linear layers, embeddings and experts take low-rank updates",
    },
    "optimizer": {
        "sharded": "updates parameters that are sharded over ranks: element by element, or by ParameterShard",
    },
}
"""Kind → capability → what a component that declares it does; components of other kinds declare none.

The configuration is checked against them before anything is imported (:mod:`nxdt_core.config.checks`): what the
selected components do not declare is an error, never silently ignored. One process in float32 without adapters needs
none. What an engine lacks of something that it declares, such as a pipeline schedule, its
:attr:`EngineComponent.rules` refuse.
"""
_KINDS = (
    ("model", "protocols.model:ModelBuilder", "model.name", "architectures"),
    ("dataset", "protocols.dataset:DatasetSplits", "data.name", "sources of training samples"),
    ("tokenizer", "protocols.tokenizer:Tokenizer", "data.tokenizer.library", "text to ids and back"),
    ("optimizer", "protocols.optimizer:OptimizerFactory", "model.optim.name", "update rules"),
    ("schedule", "protocols.schedule:ScheduleFactory", "model.optim.sched.name", "learning-rate schedules"),
    ("precision", "protocols.precision:PrecisionFactory", "precision.type", "dtypes of a run"),
    ("store", "protocols.store:CheckpointStore", "checkpoint.uri", "stores of checkpoint files"),
    ("format", "protocols.format:CheckpointFormat", "nxdt checkpoint import --format", "checkpoints of other programs"),
    ("migration", "protocols.migration:Migration", "nxdt config migrate --from", "configurations of other programs"),
    ("metric", "protocols.evaluation:Metric", "nxdt evaluate FILES", "figures of answers"),
    ("task", "protocols.evaluation:TaskSuite", "nxdt evaluate --suite", "tasks that judge a model"),
    ("adapter", "protocols.adapter:Adapter", "adapter.name", "changes to a model, such as LoRA"),
    ("objective", "protocols.objective:Objective", "objective.name", "losses"),
    ("engine", "protocols.engine:ParallelEngine", "parallel_engine.name", "runtimes that shard"),
    ("device", "distributed.devices:DeviceProfile", "trainer.accelerator", "facts about device types"),
    ("launcher", "protocols.launcher:Launcher", "nxdt launch NAME", "schedulers of clusters"),
    ("callback", "callback:Callback", "trainer.callbacks", "reports, loggers, early ends"),
)


def _check(record: object, field: str, value: object, pattern: re.Pattern[str]) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadComponentRecord(record=type(record).__name__, field=field, found=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Record of a component, which the kernel reads without importing the implementation.

    Raises:
        BadComponentRecord: a name, an alias, a reference or a set of capabilities is malformed.
    """

    name: str
    """Short name, as written in the YAML: ``mixtral``. Letters, digits, ``_ . + -``; no colon."""
    target: str
    """Location of the implementation, ``package.module:attribute``; imported when a run uses it."""
    config: str | None = None
    """``package.module:Dataclass`` of the component's own section; its module must not import torch. None: the section
    has the keys of :attr:`Kind.config`, or none."""
    summary: str = ""
    """One line for ``nxdt plugins show``."""
    aliases: tuple[str, ...] = ()
    """Other short names, such as those of an older schema."""
    suggested_for: tuple[str, ...] = ()
    """Names that other programs use, in lower case. An error suggests the component for them."""
    capabilities: frozenset[str] = frozenset()
    """Names from :data:`CAPABILITIES` for the component's kind that say what the implementation does. A configuration
    may not require a capability that its engine, model or optimizer does not declare."""
    requires: frozenset[str] = frozenset()
    """Capabilities that the run's engine must declare for this component. A precision requires ``precision`` where its
    policy is not float32 throughout."""

    _references: ClassVar[tuple[str, ...]] = ("config",)
    """Fields with a reference or None."""
    _words: ClassVar[tuple[str, ...]] = ("capabilities", "requires")
    """Fields with a set of words."""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            _check(self, "name", name, _NAME)
        _check(self, "target", self.target, _TARGET)
        for reference in self._references:
            if (value := getattr(self, reference)) is not None:
                _check(self, reference, value, _TARGET)
        for words in self._words:
            names: object = getattr(self, words)
            # A plain text would count as the set of its letters.
            if not isinstance(names, frozenset) or not all(isinstance(name, str) for name in names):
                raise BadComponentRecord(record=type(self).__name__, field=words, found=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelComponent(Component):
    """A :class:`nxdt_core.protocols.model.ModelBuilder`."""

    hf_architectures: tuple[str, ...] = ()
    """Values of ``architectures`` in a Hugging Face ``config.json`` that this builder reads; one with ``*`` is a
    pattern, which counts where no builder names the value itself."""
    recompute_names: tuple[str, ...] | None = None
    """Names that the plan's ``recompute`` has with every configuration; None if they depend on it. ``nxdt config
    check`` reports others in ``model.activations_checkpoint_recompute``."""
    tried_before_launch: bool | None = None
    """Trial build before a launch: ``nxdt config check`` and ``nxdt train`` build the model without memory, in the
    layout of the run, and send shapes through it. None: where the run shards the model (TP, PP, CP or EP). True:
    always, for builders whose models come from elsewhere. False: never, for plans that are tested in all layouts. It
    imports torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreComponent(Component):
    """A :class:`nxdt_core.protocols.store.CheckpointStore`."""

    uri_schemes: tuple[str, ...] = ()
    """Schemes of ``checkpoint.uri`` that this store serves, without ``://``: ``("s3",)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationComponent(Component):
    """A :class:`nxdt_core.protocols.migration.Migration`."""

    program: str = ""
    """Name of the program in messages, such as ``NxD Training``; empty for the component's ``name``."""
    shown_by: tuple[str, ...] = ()
    """Keys that only its files have, so that a file is recognised where the plugin is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterComponent(Component):
    """A :class:`nxdt_core.protocols.adapter.Adapter`. Each of them requires the engine's capability ``adapters``."""

    requires_of_model: frozenset[str] = frozenset()
    """Capabilities that the run's model must declare: ``{"lora"}``."""
    _words: ClassVar[tuple[str, ...]] = (*Component._words, "requires_of_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponent(Component):
    """A :class:`nxdt_core.protocols.engine.ParallelEngine`.

    One that declares none of ``dp``, ``tp``, ``pp`` and ``cp`` is never started in more than one process.
    """

    rules: str | None = None
    """``package.module:function`` that finds what this engine cannot run of what it declares: a
    :data:`nxdt_core.protocols.engine.EngineRules`. ``nxdt config check`` calls it; its module must not import
    torch."""
    _references: ClassVar[tuple[str, ...]] = (*Component._references, "rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class CliCommand:
    """A command that a plugin adds under ``nxdt``.

    Raises:
        BadComponentRecord: the name or target is malformed.
    """

    name: str
    """The verb: ``nxdt NAME``. Two words are a verb in a group: ``data count`` joins the core's ``nxdt data``
    verbs, and a group that the core does not have is made."""
    target: str
    """``package.module:attribute`` of a :class:`click.Command`; imported when the command is called."""
    summary: str
    """One line for ``nxdt --help``."""

    def __post_init__(self) -> None:
        _check(self, "name", self.name, _COMMAND)
        _check(self, "target", self.target, _TARGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFinding:
    """Something that a plugin finds wrong with a configuration."""

    key: str
    """Key path: ``model.num_layers``."""
    message: str
    """The problem, and why the value cannot work."""
    remedy: str = ""
    """The value to write instead; empty where the message says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A family of components that are interchangeable in one place of the configuration."""

    name: str
    """Singular, in snake case: ``model``."""
    hook: str
    """Registration hook that yields the records: ``nxdt_models``. Kinds that a plugin adds are
    filled through ``nxdt_components`` instead."""
    record: type[Component]
    """Record class that the hook's results must be instances of."""
    protocol: str
    """``package.module:Class``: the base class of the target, or what a target that is a function looks like."""
    section: str
    """Key of the configuration, or option of a command, that selects the component: ``model.name``."""
    summary: str = ""
    config: str | None = None
    """Dataclass of the section of a component that names none."""
    capabilities: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Capabilities that components of the kind may declare → what a component that declares it does."""


_RECORDS: dict[str, type[Component]] = {
    "model": ModelComponent,
    "store": StoreComponent,
    "migration": MigrationComponent,
    "adapter": AdapterComponent,
    "engine": EngineComponent,
}
KINDS: tuple[Kind, ...] = tuple(
    Kind(
        name=name,
        hook=f"nxdt_{name}s",
        record=_RECORDS.get(name, Component),
        protocol=f"nxdt_core.{protocol}",
        section=section,
        summary=summary,
        config="nxdt_core.train.optimizers.config:OptimizerConfig" if name == "optimizer" else None,
        capabilities=CAPABILITIES.get(name, {}),
    )
    for name, protocol, section, summary in _KINDS
)
"""The kinds that the kernel itself defines, in the order in which they are listed."""
