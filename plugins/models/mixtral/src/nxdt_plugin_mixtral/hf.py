"""Correspondence to ``MixtralForCausalLM`` of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from nxdt_core.models.huggingface import (
    DECODER_MODULES,
    ONLY,
    OPTIONAL,
    REQUIRED,
    WITHOUT_EFFECT,
    HFFamily,
    HFValues,
    weight_keys,
)
from nxdt_core.protocols.model import KeyMap

_ROUTER = {"layers.*.moe.router": "model.layers.*.block_sparse_moe.gate"}

_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""One tensor an expert in the directory. transformers 5 stacks them in memory, and still writes them so."""

MIXTRAL = HFFamily(
    values=HFValues(
        model="mixtral",
        required=REQUIRED,
        # output_router_logits is missing on purpose: it is off in released files, which are made for inference.
        optional={
            **OPTIONAL,
            "num_kv_heads": ("num_key_value_heads", 8),
            "max_position_embeddings": ("max_position_embeddings", 131072),
            "layernorm_epsilon": ("rms_norm_eps", 1e-5),
            "sliding_window": ("sliding_window", None),
            "moe.num_experts": ("num_local_experts", 8),
            "moe.top_k": ("num_experts_per_tok", 2),
            "moe.router_aux_loss_coef": ("router_aux_loss_coef", 0.001),
        },
        only={"router_jitter_noise": (0.0,), **ONLY},
    ),
    keys=(
        *weight_keys({**DECODER_MODULES, **_ROUTER}),
        *(
            KeyMap(
                name=f"layers.*.moe.experts.{ours}",
                hf_names=(f"model.layers.*.block_sparse_moe.experts.*.{theirs}.weight",),
                transform="stack",
            )
            for ours, theirs in _EXPERTS.items()
        ),
    ),
    rope_theta=1_000_000.0,
    without_effect=(
        *WITHOUT_EFFECT,
        # Those of training, and those of a router that has no form in Hugging Face's library.
        *(f"moe.{key}" for key in ("capacity_factor", "dropless", "dropout", "exchange_chunks")),
        *(f"moe.{key}" for key in ("output_router_logits", "pool_router_aux_loss")),
        *(f"moe.{key}" for key in ("router_activation", "sinkhorn_iterations", "sinkhorn_tol")),
    ),
)
