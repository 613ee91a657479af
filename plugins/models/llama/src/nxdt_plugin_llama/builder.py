"""The components ``llama`` and ``mistral``: build the module and say how it may be sharded, initialised, exchanged."""

from __future__ import annotations

from typing import ClassVar

from nxdt_core.models.decoder_builder import LAYER, MLP, NORMS, SWIGLU_STYLES, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig
from nxdt_plugin_llama.modeling import Llama


class LlamaBuilder(RotaryDecoderBuilder[LlamaConfig]):
    """A decoder with dense feed-forward blocks."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "LlamaForSequenceClassification")

    def build(self) -> Llama:
        """Return the whole model."""
        return Llama(self.config)

    def plan(self) -> ParallelPlan:
        """Return the plan of a dense decoder; the names to recompute are NxD Training's."""
        return rotary_decoder_plan(
            self.config,
            feed_forward={MLP: SWIGLU_STYLES},
            recompute={
                "LlamaMLP": (MLP,),
                "ActivationMultiplyMLP": (f"{MLP}.activation",),
                "LlamaRMSNorm": NORMS,
                "LlamaDecoderLayer": (LAYER,),
            },
        )


class MistralBuilder(LlamaBuilder):
    """A Llama whose attention has a window, after a family of Hugging Face's own."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("MistralForCausalLM", "MistralForSequenceClassification")

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
