"""The three programs, and the variables that their job scripts set and nxdt does not read.

Each run asks for the note on these, so that what only their files need is imported where there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, Migration

_NOTHING = "nothing"
_PRECISION = "precision.type"

VARIABLES: Mapping[str, str] = {
    "COMPILE": "trainer.fast_dev_run",
    "TRAIN_ITERS": "trainer.max_steps",
    "CONF_FILE": "the first argument of nxdt train",
    "PROCESSES_PER_NODE": "trainer.devices",
    "EXPLICIT_LOGDIR": "exp_manager.explicit_log_dir",
    "NEMO_EXPM_VERSION": "exp_manager.version",
    "CREATE_TB_LOGGER": "exp_manager.create_tensorboard_logger",
    "CHECKPOINT_CALLBACK": "checkpoint.enabled",
    "XLA_USE_BF16": _PRECISION,
    "XLA_DOWNCAST_BF16": _PRECISION,
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": _PRECISION,
    "XLA_DISABLE_FUNCTIONALIZATION": _NOTHING,
    "NEURON_CC_FLAGS": "parallel_engine.compiler_flags",
    "NEURON_COMPILE_CACHE_URL": "compiler_cache_url",
    "NEURON_EXTRACT_GRAPHS_ONLY": _NOTHING,
    "NEURON_RT_EXEC_TIMEOUT": "parallel_engine.neuron_rt_exec_timeout",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "parallel_engine.async_exec_max_inflight_requests",
    "NEURON_EXPERIMENTAL_COMPRESS_RG": "parallel_engine.neuron_experimental_compress_rg",
    "NEURON_FUSE_SOFTMAX": "parallel_engine.fuse_softmax",
    "NEURON_LOGICAL_NC_CONFIG": "trainer.lnc",
    "BUCKET_CAP_MB": "parallel_engine.bucket_size_collectives",
    "ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB": _NOTHING,
    "NXD_CPU_MODE": "trainer.accelerator",
    "NXD_LOG_LEVEL": _NOTHING,
    "HYDRA_FULL_ERROR": _NOTHING,
}
"""Variable → what has its effect in nxdt. Keys of the Neuron compiler and runtime need an engine of that runtime."""


class _Program(Migration):
    """A :class:`~nxdt_core.protocols.migration.Migration`. The three programs share their keys' names."""

    name: ClassVar[str]

    def recognise(self, config: Mapping[str, Any]) -> str:
        """Return the key that shows that a configuration is of this program; empty where none does."""
        from nxdt_plugin_migrate.config.detect import framework_of

        name, key = framework_of(config)
        return key if name == self.name else ""

    def explain(self, key: str, known: Collection[str]) -> KeyMeaning | None:
        """Return the key that says the same here, or why none is needed; None for a key of none of the programs."""
        from nxdt_plugin_migrate.config.renamed_keys import meaning

        return meaning(key, known)

    def migrate(self, source: Path, target: Path, kernel: Any, overrides: Mapping[str, Any]) -> MigratedConfig:
        """Rewrite a file for nxdt; see :func:`nxdt_plugin_migrate.config.migrate.migrate`."""
        from nxdt_plugin_migrate.config.migrate import migrate

        return migrate(source, target, self.name, kernel, overrides)


class NxDTraining(_Program):
    """Files of NxD Training."""

    name = "nxdt"

    _OWN: ClassVar = ("model_source", "model_alignment_strategy", "aync_exec_max_inflight_requests")
    """Keys that its files have and that files for nxdt, which share the other sections, rarely do."""

    def recognise(self, config: Mapping[str, Any]) -> str:
        """Return the first key that files for nxdt do not share."""
        return next((key for key in self._OWN if key in config), "")

    def environment_note(self, environment: Mapping[str, str]) -> str | None:
        """Return a line on the variables that job scripts of NxD Training and neuronx-nemo-megatron set."""
        names = [name for name in VARIABLES if environment.get(name)]
        if not names:
            return None
        instead = "; ".join(f"{name}: {VARIABLES[name]}" for name in names)
        return f"environment: nxdt does not read these variables of NxD Training; what has their effect here: {instead}"


class NeMo(_Program):
    """Files of NeMo 1.x."""

    name = "nemo"


class NeuronxNemoMegatron(_Program):
    """Files of neuronx-nemo-megatron."""

    name = "nnm"
