"""How a GPT may be sharded, cut and recomputed; follows from its configuration alone."""

from __future__ import annotations

from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_gpt.config import GPTConfig

__all__ = ["norms_of", "plan_of"]

_LAYER = "layers.*"
_ATTENTION, _MLP = f"{_LAYER}.attention", f"{_LAYER}.mlp"


def plan_of(config: GPTConfig) -> ParallelPlan:
    """Tensor parallelism by heads and by feed-forward columns; cuts between any two layers."""
    norms = norms_of(config)
    whole_mlp = config.transformer_block_type == "normformer"  # its norm needs every channel
    learned = config.position_embedding_type == "learned_absolute"
    return ParallelPlan(
        tensor={
            "embedding.tokens": "vocab_embedding",
            **({"embedding.positions": "replicate"} if learned else {}),
            **{f"{_ATTENTION}.{name}": "column" for name in _projections(config)},
            f"{_ATTENTION}.o_proj": "row",
            **({} if whole_mlp else _mlp_styles(config)),
            "lm_head": "vocab_head",
        },
        tensor_blocks=(_ATTENTION, "lm_head") if whole_mlp else (_ATTENTION, _MLP, "lm_head"),
        sequence_norms=norms,
        heads=_heads(config),
        pipeline=PipelinePlan(
            hidden_size=config.hidden_size,
            first=("embedding",),
            layers="layers",
            last=("lm_head",) if config.transformer_block_type == "post_ln" else ("norm", "lm_head"),
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
        tied=(("embedding.tokens.weight", "lm_head.weight"),) if config.share_embeddings_and_output_weights else (),
    )


def norms_of(config: GPTConfig) -> tuple[str, ...]:
    """Patterns of the modules that normalise."""
    more = {"post_ln": (), "normformer": (f"{_LAYER}.attention_output_norm", f"{_MLP}.norm", "norm")}
    return (
        f"{_LAYER}.attention_norm",
        f"{_LAYER}.mlp_norm",
        *more.get(config.transformer_block_type, ("norm",)),
    )


def _projections(config: GPTConfig) -> tuple[str, ...]:
    return ("qkv_proj",) if config.fused_qkv else ("q_proj", "k_proj", "v_proj")


def _mlp_styles(config: GPTConfig) -> dict[str, TensorStyle]:
    gate: dict[str, TensorStyle] = {f"{_MLP}.gate_proj": "column"} if config.gated else {}
    return {f"{_MLP}.up_proj": "column", **gate, f"{_MLP}.down_proj": "row"}


def _heads(config: GPTConfig) -> AttentionHeads:
    """A fused projection is cut like queries, each of whose heads brings its own key and value."""
    query, *key_value = _projections(config)
    return AttentionHeads(
        query_heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        query=(f"{_ATTENTION}.{query}",),
        key_value=tuple(f"{_ATTENTION}.{name}" for name in key_value),
        output=(f"{_ATTENTION}.o_proj",),
    )
