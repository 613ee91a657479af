"""Registration: what a plugin offers. Called once for each plugin when the kernel starts, on every process.

A plugin that fails in one of these is ``broken`` and none of its components is registered. Implementations
import nothing but ``nxdt_core.api`` and the standard library: a record names its target as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nxdt_core.api import (
    AdapterComponent,
    CallbackComponent,
    CheckpointFormatComponent,
    CliCommand,
    Component,
    ConfigMigrationComponent,
    DataloaderComponent,
    DeviceProfileComponent,
    EngineComponent,
    Kind,
    LauncherComponent,
    LRSchedulerComponent,
    MetricComponent,
    ModelComponent,
    ObjectiveComponent,
    OptimizerComponent,
    PrecisionComponent,
    StorageComponent,
    TaskSuiteComponent,
    TokenizerComponent,
)
from nxdt_core.kernel.hookspecs.marker import hookspec

__all__ = [
    "nxdt_adapters",
    "nxdt_callbacks",
    "nxdt_checkpoint_formats",
    "nxdt_checkpoint_storages",
    "nxdt_cli",
    "nxdt_components",
    "nxdt_config_migrations",
    "nxdt_dataloaders",
    "nxdt_device_profiles",
    "nxdt_kinds",
    "nxdt_launchers",
    "nxdt_lr_schedulers",
    "nxdt_metrics",
    "nxdt_model_builders",
    "nxdt_objectives",
    "nxdt_optimizers",
    "nxdt_parallel_engines",
    "nxdt_precision_policies",
    "nxdt_task_suites",
    "nxdt_tokenizers",
]


@hookspec
def nxdt_model_builders() -> Iterable[ModelComponent]:  # type: ignore[empty-body]
    """Offer architectures, selected by ``model.name``.

    Example::

        @hookimpl
        def nxdt_model_builders():
            return [ModelComponent(name="tiny", target="my_plugin.model:TinyBuilder", config="my_plugin.config:Tiny")]
    """


@hookspec
def nxdt_dataloaders() -> Iterable[DataloaderComponent]:  # type: ignore[empty-body]
    """Offer sources of training samples, selected by ``data.name``.

    Example::

        @hookimpl
        def nxdt_dataloaders():
            return [DataloaderComponent(name="lines", target="my_plugin.data:Lines", config="my_plugin.config:Lines")]
    """


@hookspec
def nxdt_tokenizers() -> Iterable[TokenizerComponent]:  # type: ignore[empty-body]
    """Offer tokenizers, selected by ``data.tokenizer.library``.

    Example::

        @hookimpl
        def nxdt_tokenizers():
            return [TokenizerComponent(name="words", target="my_plugin.words:WordTokenizer")]
    """


@hookspec
def nxdt_optimizers() -> Iterable[OptimizerComponent]:  # type: ignore[empty-body]
    """Offer update rules, selected by ``model.optim.name``.

    Example::

        @hookimpl
        def nxdt_optimizers():
            return [OptimizerComponent(name="lion", target="my_plugin.lion:build", config="my_plugin.config:Lion")]
    """


@hookspec
def nxdt_lr_schedulers() -> Iterable[LRSchedulerComponent]:  # type: ignore[empty-body]
    """Offer learning-rate schedules, selected by ``model.optim.sched.name``.

    Example::

        @hookimpl
        def nxdt_lr_schedulers():
            return [LRSchedulerComponent(name="sqrt", target="my_plugin.curves:inverse_sqrt")]
    """


@hookspec
def nxdt_precision_policies() -> Iterable[PrecisionComponent]:  # type: ignore[empty-body]
    """Offer choices of dtypes, selected by ``precision.type``.

    Example::

        @hookimpl
        def nxdt_precision_policies():
            return [PrecisionComponent(name="fp64", target="my_plugin.precision:fp64")]
    """


@hookspec
def nxdt_checkpoint_storages() -> Iterable[StorageComponent]:  # type: ignore[empty-body]
    """Offer stores of checkpoint bytes, selected by the scheme of ``checkpoint.uri``.

    Example::

        @hookimpl
        def nxdt_checkpoint_storages():
            return [StorageComponent(name="tape", target="my_plugin.tape:TapeStorage", uri_schemes=("tape",))]
    """


@hookspec
def nxdt_checkpoint_formats() -> Iterable[CheckpointFormatComponent]:  # type: ignore[empty-body]
    """Offer formats of other programs' checkpoints. ``nxdt checkpoint import`` and ``checkpoint.resume_from`` take the
    one that recognises the path; ``--format`` names one.

    Example::

        @hookimpl
        def nxdt_checkpoint_formats():
            return [CheckpointFormatComponent(name="acme", target="my_plugin.format:AcmeFormat",
                                              summary="a directory of Acme's with model.acme")]
    """


@hookspec
def nxdt_config_migrations() -> Iterable[ConfigMigrationComponent]:  # type: ignore[empty-body]
    """Offer migrations of other programs' configurations, selected by ``nxdt config migrate --from``. ``nxdt train``
    and ``nxdt config check`` ask them which program a file is of, and what a key means that is unknown here.

    Example::

        @hookimpl
        def nxdt_config_migrations():
            return [ConfigMigrationComponent(name="acme", target="my_plugin.migration:AcmeMigration", program="Acme",
                                             summary="YAML files of Acme 2")]
    """


@hookspec
def nxdt_metrics() -> Iterable[MetricComponent]:  # type: ignore[empty-body]
    """Offer metrics of answers to held-out records, which ``nxdt evaluate`` reports with the exact matches.

    Example::

        @hookimpl
        def nxdt_metrics():
            return [MetricComponent(name="length", target="my_plugin.metrics:Length")]
    """


@hookspec
def nxdt_task_suites() -> Iterable[TaskSuiteComponent]:  # type: ignore[empty-body]
    """Offer tasks that judge a model, which ``nxdt evaluate --task`` runs; ``--suite`` names one of several suites.

    Example::

        @hookimpl
        def nxdt_task_suites():
            return [TaskSuiteComponent(name="exams", target="my_plugin.exams:Exams")]
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
def nxdt_objectives() -> Iterable[ObjectiveComponent]:  # type: ignore[empty-body]
    """Offer losses, selected by ``objective.name``.

    Example::

        @hookimpl
        def nxdt_objectives():
            return [ObjectiveComponent(name="z_loss", target="my_plugin.objective:ZLoss")]
    """


@hookspec
def nxdt_parallel_engines() -> Iterable[EngineComponent]:  # type: ignore[empty-body]
    """Offer runtimes that distribute a model over processes, selected by ``parallel_engine.name``.

    Example::

        @hookimpl
        def nxdt_parallel_engines():
            return [EngineComponent(name="mine", target="my_plugin.engine:MyEngine")]
    """


@hookspec
def nxdt_device_profiles() -> Iterable[DeviceProfileComponent]:  # type: ignore[empty-body]
    """Describe device types, selected by ``trainer.accelerator``. The target is a
    :class:`nxdt_core.devices.DeviceProfile`, and ``name`` is what torch calls the type.

    Example::

        @hookimpl
        def nxdt_device_profiles():
            return [DeviceProfileComponent(name="xpu", target="my_plugin.device:PROFILE", summary="Intel GPUs")]
    """


@hookspec
def nxdt_launchers() -> Iterable[LauncherComponent]:  # type: ignore[empty-body]
    """Offer schedulers of clusters: ``nxdt launch NAME`` submits a run to one, and ``NXDT_LAUNCHER=NAME`` lets a
    process join by its variables.

    Example::

        @hookimpl
        def nxdt_launchers():
            return [LauncherComponent(name="acme", target="my_plugin.launcher:Acme", config="my_plugin.config:Acme",
                                      capabilities=frozenset({"join", "submit"}), summary="jobs of Acme")]
    """


@hookspec
def nxdt_callbacks() -> Iterable[CallbackComponent]:  # type: ignore[empty-body]
    """Offer callbacks, listed in ``trainer.callbacks``, and loggers, listed in ``exp_manager.loggers``.

    Example::

        @hookimpl
        def nxdt_callbacks():
            return [CallbackComponent(name="ema", target="my_plugin.ema:Ema", config="my_plugin.config:Ema")]
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
