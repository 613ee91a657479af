"""Small models, ours and transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nxdt_plugin_gpt.builder import GPTBuilder
from nxdt_plugin_gpt.config import GPTConfig

from nxdt_core.models.rope_scaling import RopeScalingConfig

Build = Callable[..., GPTBuilder]

_SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "vocab_size": 93,
    "make_vocab_size_divisible_by": 8,
    "max_position_embeddings": 256,
}


@pytest.fixture
def builder() -> Build:
    """``builder(**changes)``: of a small model with 93 ids and 96 rows."""
    return lambda **changes: GPTBuilder(GPTConfig(**{**_SMALL, **changes}))


@pytest.fixture
def from_hf() -> Callable[[dict[str, Any]], GPTBuilder]:
    """A builder for a Hugging Face configuration, as ``model.model_config`` makes it."""

    def build(hf_config: dict[str, Any]) -> GPTBuilder:
        keys = GPTConfig.from_hf(hf_config)
        scaling = keys.pop("rope_scaling", None)
        lists = {key: tuple(value) if isinstance(value, list) else value for key, value in (scaling or {}).items()}
        return GPTBuilder(GPTConfig(**keys, rope_scaling=RopeScalingConfig(**lists) if scaling else None))

    return build


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """``tokens(rows, length)``: random ids below 93."""
    return lambda rows, length: torch.randint(0, 93, (rows, length), generator=torch.Generator().manual_seed(7))
