"""The components ``llama`` and ``mistral``: build the module and say how it may be sharded, initialised, exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan
from nxdt_plugin_llama import hf
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig
from nxdt_plugin_llama.modeling import Llama

__all__ = ["LlamaBuilder", "MistralBuilder"]

_LAYER = "layers.*"
_NORMS = (f"{_LAYER}.attention_norm", f"{_LAYER}.mlp_norm", "norm")
_RESIDUAL_WRITERS = (f"{_LAYER}.attention.o_proj.weight", f"{_LAYER}.mlp.down_proj.weight")


class LlamaBuilder:
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`."""

    hf_family: ClassVar[hf.HFFamily] = hf.LLAMA
    hf_architectures: ClassVar[tuple[str, ...]] = (hf.LLAMA.architecture,)
    hf_ignored: ClassVar[tuple[str, ...]] = hf.IGNORED

    def __init__(self, config: LlamaConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model=self.hf_family.values.model, problems=problems)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_sequence_length: int | None = config.max_position_embeddings

    def build(self) -> Llama:
        """The whole model."""
        return Llama(self.config)

    def plan(self) -> ParallelPlan:
        """Tensor parallelism by heads and by feed-forward columns; cuts between any two layers."""
        attention, mlp = f"{_LAYER}.attention", f"{_LAYER}.mlp"
        return ParallelPlan(
            tensor={
                "embed_tokens": "vocab_embedding",
                f"{attention}.q_proj": "column",
                f"{attention}.k_proj": "column",
                f"{attention}.v_proj": "column",
                f"{attention}.o_proj": "row",
                f"{mlp}.gate_proj": "column",
                f"{mlp}.up_proj": "column",
                f"{mlp}.down_proj": "row",
                "lm_head": "vocab_head",
            },
            tensor_blocks=(attention, mlp, "lm_head"),
            sequence_norms=_NORMS,
            heads=AttentionHeads(
                query_heads=self.config.num_attention_heads,
                kv_heads=self.config.kv_heads,
                query=(f"{attention}.q_proj",),
                key_value=(f"{attention}.k_proj", f"{attention}.v_proj"),
                output=(f"{attention}.o_proj",),
            ),
            pipeline=PipelinePlan(
                hidden_size=self.config.hidden_size, first=("embed_tokens",), layers="layers", last=("norm", "lm_head")
            ),
            attention_cores=(f"{attention}.core",),
            recompute={
                "CoreAttention": (f"{attention}.core",),
                "LlamaMLP": (mlp,),
                "ActivationMultiplyMLP": (f"{mlp}.activation",),
                "LlamaRMSNorm": _NORMS,
                "LlamaDecoderLayer": (_LAYER,),
            },
            recompute_layer=_LAYER,
            norms=tuple(f"{norm}.weight" for norm in _NORMS),
            no_weight_decay=(),  # there are no biases
            tied=(("embed_tokens.weight", "lm_head.weight"),)
            if self.config.share_embeddings_and_output_weights
            else (),
        )

    def init_rules(self) -> Sequence[InitRule]:
        """Ones for norms, normal for matrices; narrower for those that write to the residual stream, of which each
        adds its variance (Radford et al. 2019, section 2.3)."""
        std = self.config.init_method_std
        scaled = std / math.sqrt(2 * self.config.num_layers) if self.config.use_scaled_init_method else std
        return (
            *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=1.0) for norm in _NORMS),
            *(InitRule(pattern=path, distribution="normal", std=scaled) for path in _RESIDUAL_WRITERS),
            InitRule(pattern="*", distribution="normal", std=std),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """6 for each weight that a token is multiplied with (the embedding is looked up, not multiplied), and 12 for
        each layer, query channel and position that a token sees: PaLM's convention (arXiv:2204.02311, appendix B),
        which counts later positions too, and of a window no more than it holds."""
        c = self.config
        query_width, kv_width = c.num_attention_heads * c.head_size, c.kv_heads * c.head_size
        layer = c.hidden_size * (2 * query_width + 2 * kv_width + 3 * c.ffn_hidden_size)
        weights = c.num_layers * layer + c.vocab_size * c.hidden_size
        seen = sequence_length if c.window is None else min(c.window, sequence_length)
        return 6.0 * weights + 12.0 * c.num_layers * query_width * seen

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``, with keys that both transformers 4 and 5 read."""
        config, scaling, theirs = self.config, self.config.rope_scaling, None
        if scaling is not None and scaling.kind != "default":
            values = {key: getattr(scaling, key) for key in hf.SCALING_KEYS if getattr(scaling, key) is not None}
            theirs = {"rope_type": scaling.kind} | values
        return {
            "architectures": [self.hf_family.architecture],
            "model_type": self.hf_family.values.model,
            **self.hf_family.values.write(config),
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "rope_theta": config.rope_theta,
            "rope_scaling": theirs,
        }

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry per parameter; a tied head has none of its own."""
        return hf.key_map(tied=self.config.share_embeddings_and_output_weights)


class MistralBuilder(LlamaBuilder):
    """A Llama whose attention has a window, after a family of Hugging Face's own."""

    hf_family: ClassVar[hf.HFFamily] = hf.MISTRAL
    hf_architectures: ClassVar[tuple[str, ...]] = (hf.MISTRAL.architecture,)

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
