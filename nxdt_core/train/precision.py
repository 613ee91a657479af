"""The precisions: their sections of the configuration, and what each says of the dtypes of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nxdt_core.config.section import Section
from nxdt_core.protocols.precision import PrecisionPolicy

Switch = Literal[False, True, 0, 1, "0", "1"]
"""NxD Training hands these to the environment, so its files write them as text."""

_ON = (True, 1, "1")


class BF16SRConfig(Section):
    """bfloat16 without masters."""

    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's running means between steps; ``bfloat16`` halves their size and rounds them
    stochastically, too."""


class ManualConfig(Section):
    """The switches of NxD Training one by one. None of them: everything in float32."""

    xla_use_bf16: Switch = False
    """Compute in bfloat16; nothing is kept in float32."""
    xla_downcast_bf16: Switch = False
    """Compute in bfloat16; what other keys ask for is kept in float32."""
    master_weights: bool = False
    """Keep float32 copies of the weights, which the optimizer updates."""
    fp32_grad_acc: bool = False
    """Sum up gradients in float32, over micro-batches and over ranks."""
    neuron_rt_stochastic_rounding_en: Switch = False
    """Round stochastically: the copies of masters that are computed with, else the optimizer's update."""
    parallel_layers_reduce_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype in which partial sums of tensor parallel layers are added up. It must be the compute dtype, which the sums
    have; any other is refused."""

    @property
    def computes_in_bfloat16(self) -> bool:
        """True if ``xla_use_bf16`` or ``xla_downcast_bf16`` is on."""
        return self.xla_use_bf16 in _ON or self.xla_downcast_bf16 in _ON

    @property
    def rounds_stochastically(self) -> bool:
        """True if ``neuron_rt_stochastic_rounding_en`` is on."""
        return self.neuron_rt_stochastic_rounding_en in _ON

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for switches that contradict each other."""
        if self.xla_use_bf16 in _ON and self.xla_downcast_bf16 in _ON:
            yield "xla_downcast_bf16", "xla_use_bf16 leaves nothing in float32 to cast down: set one of the two"
        if self.xla_use_bf16 in _ON:
            for key in ("master_weights", "fp32_grad_acc"):
                if getattr(self, key):
                    yield key, "xla_use_bf16 keeps nothing in float32: take xla_downcast_bf16 instead"
        if not self.computes_in_bfloat16:
            if self.master_weights:
                yield "master_weights", "the weights are float32 themselves: set xla_downcast_bf16, or leave it out"
            if self.rounds_stochastically:
                yield (
                    "neuron_rt_stochastic_rounding_en",
                    "float32 is not rounded: set xla_downcast_bf16, or leave it out",
                )
        computed = "bf16" if self.computes_in_bfloat16 else "fp32"
        if self.parallel_layers_reduce_dtype not in (None, computed):
            yield "parallel_layers_reduce_dtype", f"partial sums are in what is computed in: {computed}"


def fp32(config: object) -> PrecisionPolicy:
    """Return a policy with everything in float32."""
    return PrecisionPolicy(name="fp32")


def autocast(config: object) -> PrecisionPolicy:
    """float32 parameters, gradients and optimizer state; matrix products in bfloat16 under ``torch.autocast``."""
    return PrecisionPolicy(name="autocast", autocast="bfloat16")


def mixed_precision(config: object) -> PrecisionPolicy:
    """Forward and backward in bfloat16; weights, sums of gradients and optimizer state in float32."""
    return PrecisionPolicy(name="mixed_precision", parameters="bfloat16", master_weights=True)


def mixed_precision_sr(config: object) -> PrecisionPolicy:
    """Return :func:`mixed_precision` with stochastic rounding: the copies that forward and backward use are rounded
    stochastically."""
    return PrecisionPolicy(
        name="mixed_precisionSR", parameters="bfloat16", master_weights=True, stochastic_rounding=True
    )


def bf16_sr(config: BF16SRConfig) -> PrecisionPolicy:
    """Return the weights and gradients in bfloat16 alone; the optimizer's update is rounded into the weights
    stochastically."""
    return PrecisionPolicy(
        name="bf16SR",
        parameters="bfloat16",
        gradients="bfloat16",
        optimizer_state=config.optimizer_state,
        stochastic_rounding=True,
    )


def manual(config: ManualConfig) -> PrecisionPolicy:
    """Return what NxD Training's switches ask for."""
    if not config.computes_in_bfloat16:
        return PrecisionPolicy(name="manual")
    rounded = config.rounds_stochastically
    return PrecisionPolicy(
        name="manual",
        parameters="bfloat16",
        gradients="float32" if config.fp32_grad_acc else "bfloat16",
        optimizer_state="float32" if config.master_weights or rounded else "bfloat16",
        master_weights=config.master_weights,
        stochastic_rounding=rounded,
    )
