"""Correspondence to models of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from nxdt_core.models.huggingface import (
    DECODER_MODULES,
    ONLY,
    OPTIONAL,
    REQUIRED,
    SWIGLU_MODULES,
    HFFamily,
    HFValues,
    weight_keys,
)

_KEYS = weight_keys({**DECODER_MODULES, **SWIGLU_MODULES})
_ATTENTION_BIAS = {"attention_bias": ("attention_bias", False)}
_QWEN = {
    **OPTIONAL,
    "num_kv_heads": ("num_key_value_heads", 32),
    "max_position_embeddings": ("max_position_embeddings", 32768),
}
_ONE_WINDOW = {"use_sliding_window": (False,), **ONLY}
"""Values that a file must have. Models with ``use_sliding_window`` have windows in some layers only."""

LLAMA = HFFamily(
    values=HFValues(
        model="llama",
        required=REQUIRED,
        optional={**OPTIONAL, **_ATTENTION_BIAS, "mlp_bias": ("mlp_bias", False)},
        only=ONLY,
    ),
    keys=_KEYS,
)

MISTRAL = HFFamily(
    values=HFValues(
        model="mistral",
        required=REQUIRED,
        optional={
            **OPTIONAL,
            "num_kv_heads": ("num_key_value_heads", 8),
            "max_position_embeddings": ("max_position_embeddings", 131072),
            "sliding_window": ("sliding_window", 4096),
        },
        only=ONLY,
    ),
    keys=_KEYS,
)

QWEN2 = HFFamily(
    values=HFValues(model="qwen2", required=REQUIRED, optional=_QWEN, only=_ONE_WINDOW),
    keys=_KEYS,
    always=("qkv_bias",),
)

QWEN3 = HFFamily(
    values=HFValues(
        model="qwen3",
        required=REQUIRED,
        optional={**_QWEN, **_ATTENTION_BIAS, "head_dim": ("head_dim", 128)},
        only=_ONE_WINDOW,
    ),
    keys=_KEYS,
    always=("qk_norm",),
)
