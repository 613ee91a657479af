"""What the ``config.json`` files of released models say, and how many weights the models have.

Of the repositories that their authors keep on Hugging Face's hub; keys that all of a family share stand once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PUBLISHED", "WEIGHTS"]

_LLAMA_2 = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
    "head_dim": 128,
}
_LLAMA_3 = {
    **_LLAMA_2,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "vocab_size": 128_256,
}
_SIZE_8B = {"intermediate_size": 14_336, "num_hidden_layers": 32}
_SIZE_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
_LLAMA_3_1 = {
    **_LLAMA_3,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_3_2 = {
    **_LLAMA_3_1,
    "rope_scaling": {**_LLAMA_3_1["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
    "tie_word_embeddings": True,
}
_MIXTRAL = {
    **_LLAMA_2,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1_000_000.0,
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": {**_LLAMA_2, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_key_value_heads": 32},
    "llama2-70b": {**_LLAMA_2, **_SIZE_70B},
    "llama3-8b": {**_LLAMA_3, **_SIZE_8B},
    "llama3-70b": {**_LLAMA_3, **_SIZE_70B},
    "llama3-70b-cp": {**_LLAMA_3, **_SIZE_70B, "max_position_embeddings": 32_768},  # longer on purpose
    "llama3.1-8b": {**_LLAMA_3_1, **_SIZE_8B},
    "llama3.1-70b": {**_LLAMA_3_1, **_SIZE_70B},
    "llama3.1-405b": {
        **_LLAMA_3_1,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
    "llama3.2-1b": {
        **_LLAMA_3_2,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
    },
    "llama3.2-3b": {
        **_LLAMA_3_2,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "smollm2-135m": {
        **_LLAMA_3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49_152,
    },
    "mistral-7b": {
        **_LLAMA_2,
        **_SIZE_8B,
        "model_type": "mistral",
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral-8x7b": {**_MIXTRAL, **_SIZE_8B, "max_position_embeddings": 32_768, "router_aux_loss_coef": 0.02},
    "mixtral-8x22b": {
        **_MIXTRAL,
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "max_position_embeddings": 65_536,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
    },
}
"""By recipe, without the suffix of a layout or of a way to route."""

WEIGHTS: Mapping[str, int] = {
    "gpt-6.7b": 6_658_433_024,  # NxD Training's example: as GPT-3 6.7B, with rows up to 50,264
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-70b-cp": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "llama-50m": 48_900_608,  # sizes of our own from here on
    "llama-160m": 165_864_832,
    "llama-400m": 398_833_920,
}
"""The published numbers of weights, in full."""
