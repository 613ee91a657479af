"""The hooks, in the order in which a run meets them. Each function is a specification: its signature, its
meaning, and as its body an example of an implementation, which nothing calls.

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


hookspec = pluggy.HookspecMarker(PROJECT)
"""The decorator of hook specifications."""


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


@hookspec
def nxdt_models() -> Iterable[ModelComponent]:
    """Offer architectures, selected by ``model.name``."""
    return [ModelComponent(name="tiny", target="my_plugin.model:TinyBuilder", config="my_plugin.config:Tiny")]


@hookspec
def nxdt_datasets() -> Iterable[Component]:
    """Offer sources of training samples, selected by ``data.name``."""
    return [Component(name="lines", target="my_plugin.data:Lines", config="my_plugin.config:Lines")]


@hookspec
def nxdt_tokenizers() -> Iterable[Component]:
    """Offer tokenizers, selected by ``data.tokenizer.library``."""
    return [Component(name="words", target="my_plugin.words:WordTokenizer")]


@hookspec
def nxdt_optimizers() -> Iterable[Component]:
    """Offer update rules, selected by ``model.optim.name``."""
    return [Component(name="lion", target="my_plugin.lion:build", config="my_plugin.config:Lion")]


@hookspec
def nxdt_schedules() -> Iterable[Component]:
    """Offer learning-rate schedules, selected by ``model.optim.sched.name``."""
    return [Component(name="sqrt", target="my_plugin.curves:inverse_sqrt")]


@hookspec
def nxdt_precisions() -> Iterable[Component]:
    """Offer choices of dtypes, selected by ``precision.type``."""
    return [Component(name="fp64", target="my_plugin.precision:fp64")]


@hookspec
def nxdt_stores() -> Iterable[StoreComponent]:
    """Offer stores of checkpoint bytes, selected by the scheme of ``checkpoint.uri``."""
    return [StoreComponent(name="tape", target="my_plugin.tape:TapeStorage", uri_schemes=("tape",))]


@hookspec
def nxdt_formats() -> Iterable[Component]:
    """Offer formats of other programs' checkpoints. ``nxdt checkpoint import`` and ``checkpoint.resume_from`` take the
    one that recognises the path; ``--format`` names one."""
    return [
        Component(name="acme", target="my_plugin.format:AcmeFormat", summary="a directory of Acme's with model.acme")
    ]


@hookspec
def nxdt_migrations() -> Iterable[MigrationComponent]:
    """Offer migrations of other programs' configurations, selected by ``nxdt config migrate --from``. ``nxdt train``
    and ``nxdt config check`` ask them which program a file is of, and what a key means that is unknown here."""
    return [
        MigrationComponent(
            name="acme", target="my_plugin.migration:AcmeMigration", program="Acme", summary="YAML files of Acme 2"
        )
    ]


@hookspec
def nxdt_metrics() -> Iterable[Component]:
    """Offer metrics of answers to held-out records, which ``nxdt evaluate`` reports with the exact matches."""
    return [Component(name="length", target="my_plugin.metrics:Length")]


@hookspec
def nxdt_tasks() -> Iterable[Component]:
    """Offer tasks that judge a model, which ``nxdt evaluate --task`` runs; ``--suite`` names one of several suites."""
    return [Component(name="exams", target="my_plugin.exams:Exams")]


@hookspec
def nxdt_adapters() -> Iterable[AdapterComponent]:
    """Offer changes to a model such as LoRA, selected by ``adapter.name``."""
    return [AdapterComponent(name="bias", target="my_plugin.bias:BiasOnly", config="my_plugin.config:Bias")]


@hookspec
def nxdt_objectives() -> Iterable[Component]:
    """Offer losses, selected by ``objective.name``."""
    return [Component(name="z_loss", target="my_plugin.objective:ZLoss")]


@hookspec
def nxdt_engines() -> Iterable[EngineComponent]:
    """Offer runtimes that distribute a model over processes, selected by ``parallel_engine.name``."""
    return [EngineComponent(name="mine", target="my_plugin.engine:MyEngine")]


@hookspec
def nxdt_devices() -> Iterable[Component]:
    """Describe device types, selected by ``trainer.accelerator``. The target is a
    :class:`nxdt_core.distributed.devices.DeviceProfile`, and ``name`` is what torch calls the type."""
    return [Component(name="acme", target="my_plugin.device:PROFILE", summary="accelerators of Acme")]


@hookspec
def nxdt_launchers() -> Iterable[Component]:
    """Offer schedulers of clusters: ``nxdt launch NAME`` submits a run to one, and ``NXDT_LAUNCHER=NAME`` lets a
    process join by its variables."""
    return [
        Component(name="acme", target="my_plugin.launcher:Acme", config="my_plugin.config:Acme", summary="jobs of Acme")
    ]


@hookspec
def nxdt_callbacks() -> Iterable[Component]:
    """Offer callbacks, listed in ``trainer.callbacks``, and loggers, listed in ``exp_manager.loggers``."""
    return [Component(name="ema", target="my_plugin.ema:Ema", config="my_plugin.config:Ema")]


@hookspec
def nxdt_kinds() -> Iterable[Kind]:
    """Add a kind of component that the kernel does not know. It is filled through :func:`nxdt_components`."""
    return [
        Kind(
            name="judge",
            hook="nxdt_components",
            record=Component,
            protocol="my_plugin.judge:Judge",
            section="judge.name",
            summary="models that score samples",
        )
    ]


@hookspec
def nxdt_components() -> Mapping[str, Iterable[Component]]:
    """Offer components of kinds that plugins added, as a mapping from the kind's name to records."""
    return {"judge": [Component(name="length", target="my_plugin.judge:LengthJudge")]}


@hookspec
def nxdt_cli() -> Iterable[CliCommand]:
    """Add commands under ``nxdt``. The target, a :class:`click.Command`, is imported when it is called. A name of two
    words is a verb in a group, one of the core's or the plugin's own."""
    return [CliCommand(name="tokens", target="my_plugin.cli:count_tokens", summary="Count tokens of a file.")]


@hookspec
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Give values to keys that the user left out, as a nested tree. What the user wrote always wins."""
    return {} if context.find("data.name") else {"data": {"name": "text"}}


@hookspec
def nxdt_validate_config(context: ValidateConfigContext) -> Iterable[ConfigFinding]:
    """Report what cannot work. All findings, of the core and of all plugins, are shown together."""
    steps = context.config["trainer"]["max_steps"]
    if steps % 10:
        return [ConfigFinding(key="trainer.max_steps", message=f"{steps} is not a multiple of 10")]
    return []


HOOKS: Final[Mapping[str, Callable[..., Any]]] = {
    name: value for name, value in globals().items() if name.startswith("nxdt_")
}
"""Every specification by name."""
