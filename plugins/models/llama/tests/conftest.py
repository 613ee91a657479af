"""Small models, ours and transformers', with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig, RopeScalingConfig

Build = Callable[..., LlamaBuilder]

_SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}


@pytest.fixture
def builder() -> Build:
    """``builder(**changes)``: of a small model."""
    return lambda **changes: LlamaBuilder(LlamaConfig(**{**_SMALL, **changes}))


@pytest.fixture
def from_hf() -> Callable[[dict[str, Any]], LlamaBuilder]:
    """A builder for a Hugging Face configuration, as ``model.model_config`` makes it."""

    def build(hf_config: dict[str, Any]) -> LlamaBuilder:
        keys = LlamaConfig.from_hf(hf_config)
        if keys["rope_scaling"] is not None:
            keys["rope_scaling"] = RopeScalingConfig(**keys["rope_scaling"])
        return LlamaBuilder(LlamaConfig(**keys))

    return build


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """``tokens(rows, length)``: random ids below 96."""
    return lambda rows, length: torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(7))
