"""Environment variables that job scripts of NxD Training and neuronx-nemo-megatron set and nxdt does not read."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["VARIABLES", "environment_note"]

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


def environment_note(environment: Mapping[str, str]) -> str | None:
    """Return a line that names the variables which are set, and what to set instead; None if none is set."""
    found = [name for name in VARIABLES if environment.get(name)]
    if not found:
        return None
    instead = "; ".join(f"{name}: {VARIABLES[name]}" for name in found)
    return f"environment: nxdt does not read these variables of NxD Training; what has their effect here: {instead}"
