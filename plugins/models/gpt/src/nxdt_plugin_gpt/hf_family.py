"""What is known of one family of models in Hugging Face's library. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxdt_core.protocols.model import KeyMap

__all__ = ["ACTIVATIONS", "HFFamily", "with_biases"]

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
    keys: Mapping[str, str]
    """Ours → theirs, where a file must have the key."""
    optional_keys: Mapping[str, tuple[str, Any]]
    """Ours → theirs, and what transformers takes where a file lacks the key."""
    only: Mapping[str, tuple[Any, ...]]
    """Features of which one value is implemented; the first is named in the error."""
    from_hf: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Further keys of ours."""
    key_map: Callable[[int], Sequence[KeyMap]]
    """All parameters of a model with so many heads."""
    ignored: tuple[str, ...]


def with_biases(modules: Mapping[str, str], transform: str = "none") -> Iterator[KeyMap]:
    """Weight and bias of each module, ours → theirs; ``transform`` is of the weight."""
    for ours, theirs in modules.items():
        yield KeyMap(name=f"{ours}.weight", hf_names=(f"{theirs}.weight",), transform=transform)
        yield KeyMap(name=f"{ours}.bias", hf_names=(f"{theirs}.bias",))
