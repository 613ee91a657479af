"""Tiny configurations of families of transformers, with what each does otherwise than Llama."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

TINY: dict[str, dict[str, Any]] = {
    "qwen2": {  # biases of queries, keys and values
        **_SIZES,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},  # norms of each head
    "gemma2": {  # scaled embeddings, windows, caps, norms that begin at zero
        **_SIZES,
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {  # two rotary tables, norms of each head, windows
        **_SIZES,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {**_SIZES, "model_type": "phi3"},  # one matrix for queries, keys and values, one for gate and up
    "olmo2": {**_SIZES, "model_type": "olmo2"},  # norms over all heads, and after the blocks
}
"""``config.json`` by ``model_type``."""
