"""Infinities and NaN in Hugging Face's JSON: transformers 5 spells them ``{"__float__": "Infinity"}``. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["read_floats", "spell_floats"]

_TAG = "__float__"
_VALUES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_floats(value: Any) -> Any:
    """Return ``value`` with the floats that its spellings mean, at any depth."""
    if isinstance(value, Mapping):
        spelled = value.get(_TAG) if len(value) == 1 else None
        if isinstance(spelled, str) and spelled in _VALUES:
            return _VALUES[spelled]
        return {key: read_floats(each) for key, each in value.items()}
    return [read_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


def spell_floats(value: Any) -> Any:
    """Return ``value`` with a spelling for each float that JSON lacks, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: spell_floats(each) for key, each in value.items()}
    return [spell_floats(each) for each in value] if isinstance(value, (list, tuple)) else value
