"""Facts of one family of models in Hugging Face's library. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxdt_core.models.huggingface import HFValues
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.architecture import GPTArchitecture

ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
"""Theirs → ours; of several names for one the first is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFFamily:
    """Configuration and parameters of one architecture, there and here."""

    architecture: str
    model_type: str
    values: HFValues
    """Keys of ``config.json`` that need no translation of their values."""
    from_hf: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns further keys of ours."""
    to_hf: Callable[[GPTArchitecture], Mapping[str, Any]]
    """Returns further keys of theirs."""
    key_map: Callable[[int], Sequence[KeyMap]]
    """Returns all parameters of a model with so many heads."""
    obstacles: Callable[[GPTArchitecture], Iterator[str]]
    """Yields reasons why the architecture does not compute what a configuration says; nothing where it does."""
    ignored: tuple[str, ...]


def activation_to_hf(config: GPTArchitecture) -> str:
    """Return their name of the activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)


def common_obstacles(config: GPTArchitecture) -> Iterator[str]:
    """Yield what neither family has."""
    if config.normalization != "layernorm":
        yield f"normalization {config.normalization}"
    if config.activation not in ACTIVATIONS.values():
        yield f"activation {config.activation}"
    if not config.has_bias:
        yield "has_bias false"
    if not config.fused_qkv:
        yield "fewer key than query heads"
    if config.head_size * config.num_attention_heads != config.hidden_size:
        yield "kv_channels other than hidden_size / num_attention_heads"


def with_biases(modules: Mapping[str, str], transform: str = "none") -> Iterator[KeyMap]:
    """Weight and bias of each module, ours → theirs; ``transform`` is of the weight."""
    for ours, theirs in modules.items():
        yield KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",), transform=transform)
        yield KeyMap(name=f"{ours}.bias", hf_names=(f"{theirs}.bias",))
