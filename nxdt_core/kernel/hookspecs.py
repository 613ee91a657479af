"""The hooks, in the order in which a run meets them. Each function is a specification: signature, meaning, example.

Those that register are called once for each plugin when the kernel starts, on every process. A plugin that fails in
one of them is ``broken``, and none of its components is registered. Those of the configuration stop the command with
the name of the plugin that fails.

Arguments are one frozen object per hook, so that fields can grow without breaking a plugin, which annotates with them
under ``if TYPE_CHECKING:``. All values are plain data: no tensor, no model.

Nothing heavy is imported here. An implementation has the name of its hook, is marked with
:data:`nxdt_core.api.hookimpl`, takes the argument ``context`` or none, and gives it no default. Its module imports
``nxdt_core.api`` and the standard library alone: a record names its target as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import pluggy

from nxdt_core.api import (
    PROJECT,
    AdapterComponent,
    CliCommand,
    Component,
    ConfigFinding,
    EngineComponent,
    Kind,
    MigrationComponent,
    ModelComponent,
    StoreComponent,
)

__all__ = ["HOOKS", "ConfigDefaultsContext", "ValidateConfigContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDefaultsContext:
    """Context of the hook that runs before defaults are merged."""

    config: Mapping[str, Any]
    """The user's configuration, overrides included, as a nested plain tree. Do not change it."""
    source: str
    """Path of the file, or ``recipe:NAME``."""

    def find(self, key: str) -> Any:
        """Return what was written for a key such as ``model.optim.lr``; None where nothing was, or ``null``."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfigContext:
    """Context of the hook that runs after types and keys are checked, and before anything is built."""

    config: Mapping[str, Any]
    """The resolved configuration as a nested plain tree, with all values. It may hold secrets: do not write it."""
    components: Mapping[str, str]
    """``plugin:name`` of the selected component by slot (``model``, ``data``, ``optimizer``, …)."""
    kernel: Any
    """The :class:`~nxdt_core.kernel.Kernel`: it knows the components, also of kinds that plugins added."""


hookspec = pluggy.HookspecMarker(PROJECT)
"""The decorator of hook specifications."""


@hookspec
def nxdt_models() -> Iterable[ModelComponent]:  # type: ignore[empty-body]
    """Offer architectures, selected by ``model.name``.

    Example::

        @hookimpl
        def nxdt_models():
            return [ModelComponent(name="tiny", target="my_plugin.model:TinyBuilder", config="my_plugin.config:Tiny")]
    """


@hookspec
def nxdt_datasets() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer sources of training samples, selected by ``data.name``.

    Example::

        @hookimpl
        def nxdt_datasets():
            return [Component(name="lines", target="my_plugin.data:Lines", config="my_plugin.config:Lines")]
    """


@hookspec
def nxdt_tokenizers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer tokenizers, selected by ``data.tokenizer.library``.

    Example::

        @hookimpl
        def nxdt_tokenizers():
            return [Component(name="words", target="my_plugin.words:WordTokenizer")]
    """


@hookspec
def nxdt_optimizers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer update rules, selected by ``model.optim.name``.

    Example::

        @hookimpl
        def nxdt_optimizers():
            return [Component(name="lion", target="my_plugin.lion:build", config="my_plugin.config:Lion")]
    """


@hookspec
def nxdt_schedules() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer learning-rate schedules, selected by ``model.optim.sched.name``.

    Example::

        @hookimpl
        def nxdt_schedules():
            return [Component(name="sqrt", target="my_plugin.curves:inverse_sqrt")]
    """


@hookspec
def nxdt_precisions() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer choices of dtypes, selected by ``precision.type``.

    Example::

        @hookimpl
        def nxdt_precisions():
            return [Component(name="fp64", target="my_plugin.precision:fp64")]
    """


@hookspec
def nxdt_stores() -> Iterable[StoreComponent]:  # type: ignore[empty-body]
    """Offer stores of checkpoint bytes, selected by the scheme of ``checkpoint.uri``.

    Example::

        @hookimpl
        def nxdt_stores():
            return [StoreComponent(name="tape", target="my_plugin.tape:TapeStorage", uri_schemes=("tape",))]
    """


@hookspec
def nxdt_formats() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer formats of other programs' checkpoints. ``nxdt checkpoint import`` and ``checkpoint.resume_from`` take the
    one that recognises the path; ``--format`` names one.

    Example::

        @hookimpl
        def nxdt_formats():
            return [Component(name="acme", target="my_plugin.format:AcmeFormat",
                                              summary="a directory of Acme's with model.acme")]
    """


@hookspec
def nxdt_migrations() -> Iterable[MigrationComponent]:  # type: ignore[empty-body]
    """Offer migrations of other programs' configurations, selected by ``nxdt config migrate --from``. ``nxdt train``
    and ``nxdt config check`` ask them which program a file is of, and what a key means that is unknown here.

    Example::

        @hookimpl
        def nxdt_migrations():
            return [MigrationComponent(name="acme", target="my_plugin.migration:AcmeMigration", program="Acme",
                                             summary="YAML files of Acme 2")]
    """


@hookspec
def nxdt_metrics() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer metrics of answers to held-out records, which ``nxdt evaluate`` reports with the exact matches.

    Example::

        @hookimpl
        def nxdt_metrics():
            return [Component(name="length", target="my_plugin.metrics:Length")]
    """


@hookspec
def nxdt_tasks() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer tasks that judge a model, which ``nxdt evaluate --task`` runs; ``--suite`` names one of several suites.

    Example::

        @hookimpl
        def nxdt_tasks():
            return [Component(name="exams", target="my_plugin.exams:Exams")]
    """


@hookspec
def nxdt_adapters() -> Iterable[AdapterComponent]:  # type: ignore[empty-body]
    """Offer changes to a model such as LoRA, selected by ``adapter.name``.

    Example::

        @hookimpl
        def nxdt_adapters():
            return [AdapterComponent(name="bias", target="my_plugin.bias:BiasOnly", config="my_plugin.config:Bias")]
    """


@hookspec
def nxdt_objectives() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer losses, selected by ``objective.name``.

    Example::

        @hookimpl
        def nxdt_objectives():
            return [Component(name="z_loss", target="my_plugin.objective:ZLoss")]
    """


@hookspec
def nxdt_engines() -> Iterable[EngineComponent]:  # type: ignore[empty-body]
    """Offer runtimes that distribute a model over processes, selected by ``parallel_engine.name``.

    Example::

        @hookimpl
        def nxdt_engines():
            return [EngineComponent(name="mine", target="my_plugin.engine:MyEngine")]
    """


@hookspec
def nxdt_devices() -> Iterable[Component]:  # type: ignore[empty-body]
    """Describe device types, selected by ``trainer.accelerator``. The target is a
    :class:`nxdt_core.distributed.devices.DeviceProfile`, and ``name`` is what torch calls the type.

    Example::

        @hookimpl
        def nxdt_devices():
            return [Component(name="xpu", target="my_plugin.device:PROFILE", summary="Intel GPUs")]
    """


@hookspec
def nxdt_launchers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer schedulers of clusters: ``nxdt launch NAME`` submits a run to one, and ``NXDT_LAUNCHER=NAME`` lets a
    process join by its variables.

    Example::

        @hookimpl
        def nxdt_launchers():
            return [Component(name="acme", target="my_plugin.launcher:Acme", config="my_plugin.config:Acme",
                              summary="jobs of Acme")]
    """


@hookspec
def nxdt_callbacks() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer callbacks, listed in ``trainer.callbacks``, and loggers, listed in ``exp_manager.loggers``.

    Example::

        @hookimpl
        def nxdt_callbacks():
            return [Component(name="ema", target="my_plugin.ema:Ema", config="my_plugin.config:Ema")]
    """


@hookspec
def nxdt_kinds() -> Iterable[Kind]:  # type: ignore[empty-body]
    """Add a kind of component that the kernel does not know. It is filled through :func:`nxdt_components`.

    Example::

        @hookimpl
        def nxdt_kinds():
            return [Kind(name="judge", hook="nxdt_components", record=Component, protocol="my_plugin.judge:Judge",
                         section="judge.name", summary="models that score samples")]
    """


@hookspec
def nxdt_components() -> Mapping[str, Iterable[Component]]:  # type: ignore[empty-body]
    """Offer components of kinds that plugins added, as a mapping from the kind's name to records.

    Example::

        @hookimpl
        def nxdt_components():
            return {"judge": [Component(name="length", target="my_plugin.judge:LengthJudge")]}
    """


@hookspec
def nxdt_cli() -> Iterable[CliCommand]:  # type: ignore[empty-body]
    """Add commands under ``nxdt``. The target, a :class:`click.Command`, is imported when it is called. A name of two
    words is a verb in a group, one of the core's or the plugin's own.

    Example::

        @hookimpl
        def nxdt_cli():
            return [CliCommand(name="tokens", target="my_plugin.cli:count_tokens", summary="Count tokens of a file.")]
    """


@hookspec
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Give values to keys that the user left out, as a nested tree. What the user wrote always wins.

    Example::

        @hookimpl
        def nxdt_config_defaults(context):
            return {} if context.find("data.name") else {"data": {"name": "text"}}
    """


@hookspec
def nxdt_validate_config(context: ValidateConfigContext) -> Iterable[ConfigFinding]:  # type: ignore[empty-body]
    """Report what cannot work. All findings, of the core and of all plugins, are shown together.

    Example::

        @hookimpl
        def nxdt_validate_config(context):
            steps = context.config["trainer"]["max_steps"]
            if steps % 10:
                return [ConfigFinding(key="trainer.max_steps", message=f"{steps} is not a multiple of 10")]
            return []
    """


HOOKS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {name: value for name, value in globals().items() if name.startswith("nxdt_")}
)
"""Every specification by name."""
