"""Environment variables that the Neuron runtime and compiler read, from the keys of a configuration. No torch.

As NxD Training does: a variable that is set already wins, but for compiler flags, which are appended to it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from nxdt_core.config import ResolvedConfig
from nxdt_plugin_nxd.config import NxdConfig
from nxdt_plugin_nxd.neuron.hardware import LNC

__all__ = ["CACHE", "apply_environment", "variables_of"]

CACHE = "NEURON_COMPILE_CACHE_URL"
_FLAGS = "NEURON_CC_FLAGS"
_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_SWITCHES = {
    "xla_use_bf16": "XLA_USE_BF16",
    "xla_downcast_bf16": "XLA_DOWNCAST_BF16",
    "neuron_rt_stochastic_rounding_en": _ROUNDING,
}
_ROUNDED = "mixed_precisionSR"


_CAST_FLAGS = {
    "fp32": "--auto-cast none",
    "mixed_precision": "--enable-mixed-precision-accumulation",
    _ROUNDED: "--enable-mixed-precision-accumulation",
    "autocast": "--auto-cast none --enable-mixed-precision-accumulation",
}
"""Options that make the compiler compute in the dtypes of a policy; it rounds float32 down by default."""


def variables_of(config: ResolvedConfig) -> dict[str, str]:
    """Return the variables that a run with this engine asks for, also by the switches of ``precision.type: manual``."""
    run, selected = config.run, config.components["precision"]
    precision = None if selected is None else selected.config
    own: NxdConfig = config.selected("engine").config
    bucket = own.bucket_size_collectives
    flags = " ".join(text for text in (own.compiler_flags, _CAST_FLAGS.get(run.precision.type)) if text)
    asked: dict[str, object] = {
        _FLAGS: flags or None,
        CACHE: run.compiler_cache_url,
        LNC: run.trainer.lnc,
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": own.async_exec_max_inflight_requests,
        "BUCKET_CAP_MB": bucket,
        "ALLREDUCE_BUCKET_CAP_MB": bucket,
        "NEURON_RT_EXEC_TIMEOUT": own.neuron_rt_exec_timeout,
        "NEURON_EXPERIMENTAL_COMPRESS_RG": 1 if own.neuron_experimental_compress_rg else None,
        "NEURON_FUSE_SOFTMAX": 1 if own.fuse_softmax else None,
        _ROUNDING: 1 if run.precision.type == _ROUNDED else None,
        **{name: 1 for key, name in _SWITCHES.items() if getattr(precision, key, False) in (True, 1, "1")},
    }
    return {name: str(value) for name, value in asked.items() if value is not None}


def apply_environment(variables: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Set ``variables`` in ``environment``, which must happen before torch-xla is imported."""
    for name, value in variables.items():
        held = environment.get(name)
        if name == _FLAGS and held:
            environment[name] = held if value in held else f"{held} {value}"
        elif held is None:
            environment[name] = value
