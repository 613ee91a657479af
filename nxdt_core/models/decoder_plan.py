"""How a decoder with rotary positions may be sharded, cut into pipeline stages and recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan, PipelinePlan, TensorStyle

__all__ = ["ATTENTION", "LAYER", "MLP", "NORMS", "SWIGLU_STYLES", "rotary_decoder_plan"]

LAYER = "layers.*"
"""Pattern of the layers of a :class:`~nxdt_core.models.decoder.RotaryDecoder`."""
ATTENTION = f"{LAYER}.attention"
"""Pattern of their attention."""
MLP = f"{LAYER}.mlp"
"""Pattern of their dense feed-forward blocks."""
NORMS = (f"{LAYER}.attention_norm", f"{LAYER}.mlp_norm", "norm")
"""Patterns of the modules that normalise."""

SWIGLU_STYLES: Mapping[str, TensorStyle] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
"""Tensor parallelism within a :class:`~nxdt_core.models.mlp.SwiGLU`."""


def rotary_decoder_plan(
    config: RotaryDecoderConfig,
    *,
    feed_forward: Mapping[str, Mapping[str, TensorStyle]],
    recompute: Mapping[str, tuple[str, ...]],
) -> ParallelPlan:
    """Return the plan of a decoder: tensor parallelism by heads and by feed-forward columns, pipeline cuts between any
    two layers. A model with further parts changes the result with :func:`dataclasses.replace`.

    Args:
        config: the model's sizes.
        feed_forward: pattern of feed-forward blocks → the style of each projection in them, such as
            ``{MLP: SWIGLU_STYLES}``. Blocks that do not exist must not be named: a pattern that matches nothing is an
            error.
        recompute: names for ``model.activations_checkpoint_recompute`` besides ``CoreAttention``.
    """
    projections = {f"{block}.{name}": style for block, styles in feed_forward.items() for name, style in styles.items()}
    return ParallelPlan(
        tensor={
            "embed_tokens": "vocab_embedding",
            f"{ATTENTION}.q_proj": "column",
            f"{ATTENTION}.k_proj": "column",
            f"{ATTENTION}.v_proj": "column",
            f"{ATTENTION}.o_proj": "row",
            **projections,
            "lm_head": "vocab_head",
        },
        tensor_blocks=(ATTENTION, *feed_forward, "lm_head"),
        sequence_norms=NORMS,
        heads=AttentionHeads(
            query_heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            query=(f"{ATTENTION}.q_proj",),
            key_value=(f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
            output=(f"{ATTENTION}.o_proj",),
        ),
        pipeline=PipelinePlan(
            hidden_size=config.hidden_size, first=("embed_tokens",), layers="layers", last=("norm", "lm_head")
        ),
        attention_cores=(f"{ATTENTION}.core",),
        recompute={"CoreAttention": (f"{ATTENTION}.core",), **recompute},
        cheap=(*NORMS, *(f"{block}.activation" for block, styles in feed_forward.items() if "gate_proj" in styles)),
        recompute_layer=LAYER,
        norms=tuple(f"{norm}.weight" for norm in NORMS),
        no_weight_decay=(),  # there are no biases
        tied=(("embed_tokens.weight", "lm_head.weight"),) if config.share_embeddings_and_output_weights else (),
    )
