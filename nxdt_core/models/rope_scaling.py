"""Section ``rope_scaling`` of a model, and how a Hugging Face ``config.json`` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from nxdt_core.config.annotations import PositiveInt
from nxdt_core.config.section import Section
from nxdt_core.errors.models import HFUnsupported

__all__ = ["RopeScalingConfig", "RopeType", "scaling_from_hf", "scaling_to_hf"]

RopeType = Literal["default", "linear", "llama3"]

_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED: Mapping[RopeType, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _KEYS}


class RopeScalingConfig(Section):
    """Stretches the rotary embedding beyond the context that a model was first trained on."""

    rope_type: RopeType | None = None
    """``linear`` divides all frequencies, ``llama3`` the slow ones, ``default`` changes nothing."""
    type: RopeType | None = None
    """Older spelling of ``rope_type``."""
    factor: float | None = None
    """How many times longer the context becomes."""
    low_freq_factor: float | None = None
    """``llama3``: wavelengths above the original context divided by this are scaled in full."""
    high_freq_factor: float | None = None
    """``llama3``: wavelengths below the original context divided by this are kept."""
    original_max_position_embeddings: PositiveInt | None = None
    """``llama3``: the original context in tokens."""

    @property
    def kind(self) -> RopeType:
        """The type, by either spelling."""
        return self.rope_type or self.type or "default"

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.rope_type is None and self.type is None:
            yield "rope_type", "is missing: default, linear or llama3"
        if self.rope_type is not None and self.type is not None and self.rope_type != self.type:
            yield "type", f"is an older spelling of rope_type, which says {self.rope_type!r}"
        for key in _NEEDED[self.kind]:
            value = getattr(self, key)
            if value is None:
                yield key, f"is needed by rope_type {self.kind!r}"
            elif value <= 0:
                yield key, "must be above 0"
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and high <= low:
            yield "high_freq_factor", f"must be above low_freq_factor ({low:g})"


def scaling_from_hf(
    rope: Mapping[str, Any], *, model: str, supported: Sequence[RopeType], max_position_embeddings: int
) -> dict[str, Any] | None:
    """Return the keys of :class:`RopeScalingConfig` that the rotary keys of a ``config.json`` give; None for none.

    Args:
        rope: the result of :func:`nxdt_core.config.huggingface.rope_of`, with the keys of older files.
        model: name of the model for the error message.
        supported: types that the model implements.
        max_position_embeddings: the original context where a ``llama3`` scaling does not give one.

    Raises:
        HFUnsupported: the file asks for another type, or rotates only some channels of a head.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in supported:
        *first, last = (repr(name) for name in supported)
        names = f"{', '.join(first)} and {last}" if first else last
        raise HFUnsupported(model=model, key="rope_type", found=kind, supported=names)
    partial = rope.get("partial_rotary_factor")
    if partial not in (1.0, None):
        raise HFUnsupported(model=model, key="partial_rotary_factor", found=partial, supported="1.0")
    if kind == "default":
        return None
    scaling = {"rope_type": kind} | {key: rope[key] for key in _KEYS if key in rope}
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    return scaling


def scaling_to_hf(scaling: RopeScalingConfig | None) -> dict[str, Any] | None:
    """Return the value of ``rope_scaling`` in a ``config.json``; None where nothing is scaled."""
    if scaling is None or scaling.kind == "default":
        return None
    values = {key: getattr(scaling, key) for key in _KEYS}
    return {"rope_type": scaling.kind} | {key: value for key, value in values.items() if value is not None}
