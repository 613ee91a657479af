"""The components ``llama``, ``mistral``, ``qwen2`` and ``qwen3``: how they are built, sharded and exchanged.

All are rotary decoders with dense feed-forward blocks, in plain torch.
"""

from __future__ import annotations

from typing import ClassVar

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.decoder_builder import LAYER, MLP, NORMS, SWIGLU_STYLES, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_llama.config import LlamaConfig


class Llama(RotaryDecoder):
    """Touvron et al. 2023 (arXiv:2302.13971) with the changes of Llama 2 and 3 (arXiv:2407.21783); with a window, the
    model of Jiang et al. 2023 (arXiv:2310.06825)."""

    def __init__(self, config: LlamaConfig) -> None:
        masks = DocumentMasks()
        blocks = (
            SwiGLU(config.hidden_size, config.ffn_hidden_size, bias=config.mlp_bias) for _ in range(config.num_layers)
        )
        super().__init__(config, (RotaryDecoderLayer(config, masks, block) for block in blocks))


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


class Qwen2Builder(LlamaBuilder):
    """A Llama with biases of queries, keys and values."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)


class Qwen3Builder(LlamaBuilder):
    """A Llama whose heads' queries and keys are normalised."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
