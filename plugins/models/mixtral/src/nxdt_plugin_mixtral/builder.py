"""The component ``mixtral``: builds the module and says how it may be sharded, initialised and exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_mixtral import hf
from nxdt_plugin_mixtral.config import MixtralConfig
from nxdt_plugin_mixtral.errors import NoHFForm
from nxdt_plugin_mixtral.modeling import Mixtral

__all__ = ["MixtralBuilder"]

_LAYER = "layers.*"
_ATTENTION, _MOE, _MLP = f"{_LAYER}.attention", f"{_LAYER}.moe", f"{_LAYER}.mlp"
_NORMS = (f"{_LAYER}.attention_norm", f"{_LAYER}.mlp_norm", "norm")
_RESIDUAL_WRITERS = (f"{_ATTENTION}.o_proj.weight", f"{_MOE}.experts.down_proj", f"{_MLP}.down_proj.weight")


class MixtralBuilder:
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)
    hf_ignored: ClassVar[tuple[str, ...]] = hf.IGNORED

    def __init__(self, config: MixtralConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="mixtral", problems=problems)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_sequence_length: int | None = config.max_position_embeddings

    def build(self) -> Mixtral:
        """The whole model."""
        return Mixtral(self.config)

    def plan(self) -> ParallelPlan:
        """Tensor parallelism by heads and by the columns of each expert, expert parallelism by experts; cuts between
        any two layers."""
        blocks = (_MOE, _MLP) if self._dense_layers else (_MOE,)
        tied = self.config.share_embeddings_and_output_weights
        return ParallelPlan(
            tensor={
                "embed_tokens": "vocab_embedding",
                f"{_ATTENTION}.q_proj": "column",
                f"{_ATTENTION}.k_proj": "column",
                f"{_ATTENTION}.v_proj": "column",
                f"{_ATTENTION}.o_proj": "row",
                **self._dense_styles(),
                "lm_head": "vocab_head",
            },
            tensor_blocks=(_ATTENTION, *blocks, "lm_head"),
            sequence_norms=_NORMS,
            heads=AttentionHeads(
                query_heads=self.config.num_attention_heads,
                kv_heads=self.config.kv_heads,
                query=(f"{_ATTENTION}.q_proj",),
                key_value=(f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
                output=(f"{_ATTENTION}.o_proj",),
            ),
            pipeline=PipelinePlan(
                hidden_size=self.config.hidden_size, first=("embed_tokens",), layers="layers", last=("norm", "lm_head")
            ),
            attention_cores=(f"{_ATTENTION}.core",),
            experts=(f"{_MOE}.experts",),
            expert_tensor={
                f"{_MOE}.experts.gate_proj": "column",
                f"{_MOE}.experts.up_proj": "column",
                f"{_MOE}.experts.down_proj": "row",
            },
            expert_dispatchers=(f"{_MOE}.dispatcher",),
            expert_routers=(f"{_MOE}.router",),
            recompute={
                "CoreAttention": (f"{_ATTENTION}.core",),
                "LlamaMLP": blocks,
                "MixtralRMSNorm": _NORMS,
                "MixtralDecoderLayer": (_LAYER,),
            },
            recompute_layer=_LAYER,
            norms=tuple(f"{norm}.weight" for norm in _NORMS),
            no_weight_decay=(),  # there are no biases
            tied=(("embed_tokens.weight", "lm_head.weight"),) if tied else (),
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
        """6 for each weight that a token is multiplied with, of experts those that it is sent to (the embedding is
        looked up, not multiplied), and 12 for each layer, query channel and position: PaLM's convention
        (arXiv:2204.02311, appendix B), and of a window no more than it holds."""
        c = self.config
        query_width, kv_width = c.num_attention_heads * c.head_size, c.kv_heads * c.head_size
        attention = c.num_layers * 2 * (query_width + kv_width)
        sparse = len(c.expert_layers) * (c.moe.top_k * 3 * c.ffn_hidden_size + c.moe.num_experts)
        dense = self._dense_layers * 3 * c.ffn_hidden_size
        weights = c.hidden_size * (attention + sparse + dense + c.vocab_size)
        seen = sequence_length if c.sliding_window is None else min(c.sliding_window, sequence_length)
        return 6.0 * weights + 12.0 * c.num_layers * query_width * seen

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``, with keys that both transformers 4 and 5 read.

        Raises:
            NoHFForm: transformers' model computes something else.
        """
        config = self.config
        for key, wanted in (("frequency", 1), ("routing_algorithm", "top_k"), ("normalize_top_k_affinities", True)):
            found = getattr(config.moe, key)
            if found != wanted:
                raise NoHFForm(key=f"model.moe.{key}", found=found, wanted=wanted)
        theirs = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_theta": config.rope_theta}
        return {
            **theirs,
            **hf.VALUES.write(config),
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
        }

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry per parameter; a tied head has none of its own."""
        return hf.key_map(tied=self.config.share_embeddings_and_output_weights)

    @property
    def _dense_layers(self) -> int:
        return self.config.num_layers - len(self.config.expert_layers)

    def _dense_styles(self) -> dict[str, TensorStyle]:
        """Patterns of a plan that match nothing are an error, so these come with such layers alone."""
        if not self._dense_layers:
            return {}
        return {f"{_MLP}.gate_proj": "column", f"{_MLP}.up_proj": "column", f"{_MLP}.down_proj": "row"}
