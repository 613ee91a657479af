"""The component ``gpt``: builds the module, and says how it is sharded, initialised and exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.decoder_builder import decoder_flops_per_token, residual_init_rules
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import AttentionHeads, InitRule, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_gpt import hf
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.modeling import GPT

_LAYER = "layers.*"
_ATTENTION, _MLP = f"{_LAYER}.attention", f"{_LAYER}.mlp"
_RESIDUAL_WRITERS = ("layers.*.attention.o_proj.weight", "layers.*.mlp.down_proj.weight")


class GPTBuilder(ModelBuilder):
    """Builds Megatron's GPT, and its counterparts at Hugging Face."""

    hf_architectures: ClassVar[tuple[str, ...]] = tuple(family.architecture for family in hf.FAMILIES)
    hf_may_lack: ClassVar[tuple[str, ...]] = ("score.weight",)
    hf_ignored: ClassVar[tuple[str, ...]] = hf.IGNORED

    def __init__(self, config: GPTConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="gpt", problems=problems)
        self.config = config
        self.vocab_size = config.vocab_rows
        self.max_sequence_length: int | None = config.max_position_embeddings

    def build(self) -> GPT:
        """Return the whole model."""
        return GPT(self.config)

    def plan(self) -> ParallelPlan:
        """Return the plan: tensor parallelism by heads and by feed-forward columns; cuts between any two layers."""
        config, norms = self.config, norms_of(self.config)
        whole_mlp = config.transformer_block_type == "normformer"  # its norm needs every channel
        learned = config.position_embedding_type == "learned_absolute"
        # A fused projection is cut like queries, each of whose heads brings its own key and value.
        query, *key_value = ("qkv_proj",) if config.fused_qkv else ("q_proj", "k_proj", "v_proj")
        mlp_styles: dict[str, TensorStyle] = {f"{_MLP}.up_proj": "column", f"{_MLP}.down_proj": "row"}
        if config.gated:
            mlp_styles[f"{_MLP}.gate_proj"] = "column"
        return ParallelPlan(
            tensor={
                "embedding.tokens": "vocab_embedding",
                **({"embedding.positions": "replicate"} if learned else {}),
                **{f"{_ATTENTION}.{name}": "column" for name in (query, *key_value)},
                f"{_ATTENTION}.o_proj": "row",
                **({} if whole_mlp else mlp_styles),
                config.head_name: "score_head" if config.score_head else "vocab_head",
            },
            tensor_blocks=(
                _ATTENTION,
                *(() if whole_mlp else (_MLP,)),
                *(() if config.score_head else (config.head_name,)),
            ),
            sequence_norms=norms,
            heads=AttentionHeads(
                query_heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                query=(f"{_ATTENTION}.{query}",),
                key_value=tuple(f"{_ATTENTION}.{name}" for name in key_value),
                output=(f"{_ATTENTION}.o_proj",),
            ),
            pipeline=PipelinePlan(
                hidden_size=config.hidden_size,
                first=("embedding",),
                layers="layers",
                last=(*(() if config.transformer_block_type == "post_ln" else ("norm",)), config.head_name),
            ),
            attention_cores=(f"{_ATTENTION}.core",),
            recompute={
                "CoreAttention": (f"{_ATTENTION}.core",),
                "MLP": (_MLP,),
                "ActivationMultiplyMLP": (f"{_MLP}.activation",),
                "Norm": norms,
                "DecoderLayer": (_LAYER,),
            },
            cheap=(*norms, f"{_MLP}.activation"),
            recompute_layer=_LAYER,
            norms=tuple(f"{norm}.weight" for norm in norms),
            no_weight_decay=("*.bias",),
            tied=(("embedding.tokens.weight", "lm_head.weight"),) if config.tied else (),
            refused=config.rope_scaling.refused(config.max_position_embeddings) if config.rope_scaling else {},
        )

    def init_rules(self) -> Sequence[InitRule]:
        """Return the rules of :func:`nxdt_core.models.decoder_builder.residual_init_rules`; a ``layernorm1p`` starts at
        zero, its difference from one."""
        c = self.config
        return residual_init_rules(
            norms=norms_of(c),
            residual_writers=_RESIDUAL_WRITERS,
            std=c.init_method_std,
            num_layers=c.num_layers,
            scaled=c.use_scaled_init_method,
            norm_weight=0.0 if c.normalization == "layernorm1p" else 1.0,
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.decoder_builder.decoder_flops_per_token` for this model."""
        c = self.config
        block = (3 if c.gated else 2) * c.hidden_size * c.ffn_size
        rows = 1 if c.score_head else c.vocab_rows
        return decoder_flops_per_token(c, sequence_length, feed_forward=c.num_layers * block, vocab_rows=rows)

    def config_to_hf(self) -> dict[str, Any]:
        """Return :func:`nxdt_plugin_gpt.hf.config_to_hf` of the configuration."""
        return hf.config_to_hf(self.config)

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return :func:`nxdt_plugin_gpt.hf.key_map` of the configuration."""
        return hf.key_map(self.config)


def norms_of(config: GPTConfig) -> tuple[str, ...]:
    """Patterns of the modules that normalise."""
    more = {"post_ln": (), "normformer": (f"{_LAYER}.attention_output_norm", f"{_MLP}.norm", "norm")}
    return (
        f"{_LAYER}.attention_norm",
        f"{_LAYER}.mlp_norm",
        *more.get(config.transformer_block_type, ("norm",)),
    )
