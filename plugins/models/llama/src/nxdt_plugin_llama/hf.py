"""Correspondence to models of Hugging Face: configuration and names of parameters. No torch here."""

from __future__ import annotations

from nxdt_core.config.huggingface import HFValues
from nxdt_core.models.huggingface import (
    DECODER_MODULES,
    ONLY,
    OPTIONAL,
    REQUIRED,
    SWIGLU_MODULES,
    HFFamily,
    weight_keys,
)
from nxdt_core.models.rope_scaling import RopeType

_KEYS = weight_keys({**DECODER_MODULES, **SWIGLU_MODULES})
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")

LLAMA = HFFamily(
    values=HFValues(
        model="llama",
        required=REQUIRED,
        optional=OPTIONAL,
        only={"attention_bias": (False,), "mlp_bias": (False,), **ONLY},
    ),
    keys=_KEYS,
    rope_types=_ROPE_TYPES,
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
    rope_types=_ROPE_TYPES,
)
