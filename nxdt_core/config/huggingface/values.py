"""Values of a Hugging Face ``config.json`` under our names, and back: a table that a model's plugin fills. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nxdt_core.errors.models import HFFileDamaged, HFUnsupported

__all__ = ["HFValues", "architectures_of", "number_of", "older_rope", "rope_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HFValues:
    """Which of our keys correspond to which of theirs; ours are dotted where they are in a section of the model's."""

    model: str
    """For messages."""
    required: Mapping[str, str]
    """Ours → theirs, where a file must have the key."""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Ours → theirs, and what transformers takes where a file lacks the key."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Theirs → the values that are implemented, of features without a key of ours; the first is named in the error."""

    @property
    def names(self) -> dict[str, str]:
        """Return the key of the file for each key of ours."""
        return dict(self.required) | {ours: theirs for ours, (theirs, _) in self.optional.items()}

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our keys from those of a ``config.json``.

        Raises:
            HFUnsupported: the model has a feature that is not implemented.
            HFFileDamaged: a required key is missing.
        """
        for key, allowed in self.only.items():
            if hf_config.get(key) not in (*allowed, None):
                raise HFUnsupported(model=self.model, key=key, found=hf_config[key], supported=repr(allowed[0]))
        missing = [theirs for theirs in self.required.values() if theirs not in hf_config]
        if missing:
            raise HFFileDamaged(path="config.json", reason=f"it has no {', '.join(missing)}")
        ours = {key: hf_config[theirs] for key, theirs in self.required.items()}
        return ours | {key: hf_config.get(theirs, default) for key, (theirs, default) in self.optional.items()}

    def write(self, config: object) -> dict[str, Any]:
        """Their keys from the section, and the first implemented value of each feature."""
        features = {key: allowed[0] for key, allowed in self.only.items() if allowed[0] is not None}
        return features | {theirs: attrgetter(ours)(config) for ours, theirs in self.names.items()}


def architectures_of(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in ``architectures``; empty where the file has none.

    Raises:
        HFFileDamaged: they are not a list of strings.
    """
    found = hf_config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise HFFileDamaged(path="config.json", reason=f"architectures must be a list of names, and is {found!r}")
    return tuple(found)


def rope_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping that describes the rotary embedding; empty where the file has none.

    transformers 5 writes ``rope_parameters``; 4 wrote ``rope_scaling`` next to ``rope_theta``. Both versions let
    ``rope_scaling`` replace ``rope_parameters`` in a file with both: people add it to extend the context.

    Raises:
        HFFileDamaged: it is not a mapping.
    """
    for key in ("rope_scaling", "rope_parameters"):
        found = hf_config.get(key)
        if found and not isinstance(found, Mapping):
            raise HFFileDamaged(path="config.json", reason=f"{key} must be a mapping or null, and is {found!r}")
        if found:
            return dict(found)
    return {}


def older_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which transformers 4 looks for what ``rope_parameters`` says; empty where a file has none."""
    found = hf_config.get("rope_parameters") or {}
    rope, local = found.get("full_attention", found), found.get("sliding_attention", {})
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return older
    name = "type" if kind == "longrope" else "rope_type"  # Phi-3 knows that by its first name alone
    rest = {key: value for key, value in rope.items() if key not in {"rope_type", *older, *hf_config}}
    return older | {"rope_scaling": {name: kind, **rest}}


def number_of(values: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number at ``key``, or ``default`` where there is none.

    Raises:
        HFFileDamaged: it is not a finite number.
    """
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise HFFileDamaged(path="config.json", reason=f"{key} must be a finite number, and is {found!r}")
    return float(found)
