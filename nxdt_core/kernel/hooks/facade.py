"""The typed facade of the hooks: one method for each specification, under the specification's name.

Registration hooks are called by the kernel alone, when it starts; the registry holds what they gave. The others
are called by the configuration, the training path and the checkpoints, with one frozen context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.kernel.hooks.calls import HookCalls, HookResult, Implementation

if TYPE_CHECKING:
    from nxdt_core import api
    from nxdt_core.kernel import contexts

__all__ = ["Hooks"]


class Hooks:
    """All hooks of a started kernel.

    Example::

        for result in kernel.hooks.nxdt_validate_config(context):
            for finding in result.value:
                print(result.plugin, finding.key, finding.message)
    """

    __slots__ = ("_calls",)

    def __init__(self, by_hook: Mapping[str, tuple[Implementation, ...]]) -> None:
        self._calls = HookCalls(by_hook)

    def implementations(self, hook: str) -> tuple[Implementation, ...]:
        """Who implements ``hook``, in calling order."""
        return self._calls.implementations(hook)

    # Registration

    def nxdt_model_builders(self) -> tuple[HookResult[Iterable[api.ModelComponent]], ...]:
        """Architectures that plugins offer."""
        return tuple(self._calls.collect("nxdt_model_builders"))

    def nxdt_dataloaders(self) -> tuple[HookResult[Iterable[api.DataloaderComponent]], ...]:
        """Sources of samples that plugins offer."""
        return tuple(self._calls.collect("nxdt_dataloaders"))

    def nxdt_tokenizers(self) -> tuple[HookResult[Iterable[api.TokenizerComponent]], ...]:
        """Tokenizers that plugins offer."""
        return tuple(self._calls.collect("nxdt_tokenizers"))

    def nxdt_optimizers(self) -> tuple[HookResult[Iterable[api.OptimizerComponent]], ...]:
        """Update rules that plugins offer."""
        return tuple(self._calls.collect("nxdt_optimizers"))

    def nxdt_lr_schedulers(self) -> tuple[HookResult[Iterable[api.LRSchedulerComponent]], ...]:
        """Learning-rate curves that plugins offer."""
        return tuple(self._calls.collect("nxdt_lr_schedulers"))

    def nxdt_precision_policies(self) -> tuple[HookResult[Iterable[api.PrecisionComponent]], ...]:
        """Choices of dtypes that plugins offer."""
        return tuple(self._calls.collect("nxdt_precision_policies"))

    def nxdt_checkpoint_storages(self) -> tuple[HookResult[Iterable[api.StorageComponent]], ...]:
        """Stores that plugins offer."""
        return tuple(self._calls.collect("nxdt_checkpoint_storages"))

    def nxdt_checkpoint_formats(self) -> tuple[HookResult[Iterable[api.CheckpointFormatComponent]], ...]:
        """Checkpoints of other programs that plugins read."""
        return tuple(self._calls.collect("nxdt_checkpoint_formats"))

    def nxdt_config_migrations(self) -> tuple[HookResult[Iterable[api.ConfigMigrationComponent]], ...]:
        """Configurations of other programs that plugins take over."""
        return tuple(self._calls.collect("nxdt_config_migrations"))

    def nxdt_metrics(self) -> tuple[HookResult[Iterable[api.MetricComponent]], ...]:
        """Figures of answers that plugins compute."""
        return tuple(self._calls.collect("nxdt_metrics"))

    def nxdt_task_suites(self) -> tuple[HookResult[Iterable[api.TaskSuiteComponent]], ...]:
        """Tasks that plugins run on a model."""
        return tuple(self._calls.collect("nxdt_task_suites"))

    def nxdt_adapters(self) -> tuple[HookResult[Iterable[api.AdapterComponent]], ...]:
        """Adapters that plugins offer."""
        return tuple(self._calls.collect("nxdt_adapters"))

    def nxdt_objectives(self) -> tuple[HookResult[Iterable[api.ObjectiveComponent]], ...]:
        """Losses that plugins offer."""
        return tuple(self._calls.collect("nxdt_objectives"))

    def nxdt_parallel_engines(self) -> tuple[HookResult[Iterable[api.EngineComponent]], ...]:
        """Engines that plugins offer."""
        return tuple(self._calls.collect("nxdt_parallel_engines"))

    def nxdt_loggers(self) -> tuple[HookResult[Iterable[api.LoggerComponent]], ...]:
        """Loggers that plugins offer."""
        return tuple(self._calls.collect("nxdt_loggers"))

    def nxdt_callbacks(self) -> tuple[HookResult[Iterable[api.CallbackComponent]], ...]:
        """Callbacks that plugins offer."""
        return tuple(self._calls.collect("nxdt_callbacks"))

    def nxdt_kinds(self) -> tuple[HookResult[Iterable[api.Kind]], ...]:
        """Kinds that plugins add."""
        return tuple(self._calls.collect("nxdt_kinds"))

    def nxdt_components(self) -> tuple[HookResult[Mapping[str, Iterable[api.Component]]], ...]:
        """Records by name of a kind that a plugin added."""
        return tuple(self._calls.collect("nxdt_components"))

    def nxdt_cli(self) -> tuple[HookResult[Iterable[api.CliCommand]], ...]:
        """Commands that plugins add."""
        return tuple(self._calls.collect("nxdt_cli"))

    # Configuration: a failure stops with PluginHookFailed

    def nxdt_config_defaults(
        self, context: contexts.ConfigDefaultsContext
    ) -> tuple[HookResult[Mapping[str, Any]], ...]:
        """Nested trees of defaults."""
        return tuple(self._calls.collect("nxdt_config_defaults", context))

    def nxdt_validate_config(
        self, context: contexts.ValidateConfigContext
    ) -> tuple[HookResult[Iterable[api.ConfigFinding]], ...]:
        """What plugins find wrong."""
        return tuple(self._calls.collect("nxdt_validate_config", context))

    def nxdt_configure(self, context: contexts.ConfigureContext) -> None:
        """Tell plugins that the configuration is final."""
        tuple(self._calls.collect("nxdt_configure", context))

    # Resolution: the first answer; a failure stops with PluginHookFailed

    def nxdt_resolve_model(self, context: contexts.ResolveModelContext) -> HookResult[str] | None:
        """Name of the model builder that is meant, or None where nobody knows."""
        return self._calls.first("nxdt_resolve_model", context)

    def nxdt_resolve_checkpoint_storage(self, context: contexts.ResolveStorageContext) -> HookResult[str] | None:
        """Name of the store that is meant, or None where nobody knows."""
        return self._calls.first("nxdt_resolve_checkpoint_storage", context)

    # Observers: a failure is logged and stops nothing

    def nxdt_fit_start(self, context: contexts.FitContext) -> None:
        """Training is about to take its first step."""
        self._calls.observe("nxdt_fit_start", context)

    def nxdt_step_end(self, context: contexts.StepContext) -> None:
        """An optimizer step is done."""
        self._calls.observe("nxdt_step_end", context)

    def nxdt_fit_end(self, context: contexts.FitContext) -> None:
        """Training ended."""
        self._calls.observe("nxdt_fit_end", context)

    def nxdt_checkpoint_saved(self, context: contexts.CheckpointContext) -> None:
        """A checkpoint is committed."""
        self._calls.observe("nxdt_checkpoint_saved", context)

    def nxdt_checkpoint_loaded(self, context: contexts.CheckpointContext) -> None:
        """A checkpoint was loaded."""
        self._calls.observe("nxdt_checkpoint_loaded", context)
