"""Small models, ours and transformers', with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nxdt_plugin_mixtral.builder import MixtralBuilder
from nxdt_plugin_mixtral.config import MixtralConfig, MoEConfig

Build = Callable[..., MixtralBuilder]

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
    """``builder(**changes)``: of a small model; ``moe``: keys of that section."""

    def build(**changes: Any) -> MixtralBuilder:
        moe = MoEConfig(**{"num_experts": 4, **changes.pop("moe", {})})
        return MixtralBuilder(MixtralConfig(**{**_SMALL, **changes}, moe=moe))

    return build


@pytest.fixture
def from_hf() -> Callable[[dict[str, Any]], MixtralBuilder]:
    """A builder for a Hugging Face configuration, as ``model.model_config`` makes it."""

    def build(hf_config: dict[str, Any]) -> MixtralBuilder:
        keys = MixtralConfig.from_hf(hf_config)
        moe = {key.removeprefix("moe."): keys.pop(key) for key in list(keys) if key.startswith("moe.")}
        return MixtralBuilder(MixtralConfig(**keys, moe=MoEConfig(**moe)))

    return build


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """``tokens(rows, length)``: random ids below 96."""
    return lambda rows, length: torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(7))
