"""Reads a Hugging Face ``config.json``: which family it is of, and the keys of ours that it gives. No torch here.

The families are in :mod:`nxdt_plugin_gpt.hf_gpt2` and :mod:`nxdt_plugin_gpt.hf_neox`; the way back is
:mod:`nxdt_plugin_gpt.hf_export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_plugin_gpt.hf_family import HFFamily
from nxdt_plugin_gpt.hf_gpt2 import GPT2
from nxdt_plugin_gpt.hf_neox import GPT_NEOX

__all__ = ["FAMILIES", "IGNORED", "config_from_hf", "names_in_hf"]

FAMILIES: Mapping[str, HFFamily] = {family.architecture: family for family in (GPT2, GPT_NEOX)}
"""By architecture."""

IGNORED = tuple(name for family in FAMILIES.values() for name in family.ignored)
"""Tensors that a directory may hold and no parameter needs: masks and rotary tables of old exports, and the head beside
a tied embedding (with an untied one the key map takes it)."""


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of :class:`GPTConfig` from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model is of another family or has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    kind = hf_config.get("model_type")
    family = next((family for family in FAMILIES.values() if family.model_type == kind), None)
    if family is None:
        known = " and ".join(repr(family.model_type) for family in FAMILIES.values())
        raise HFUnsupported(model="gpt", key="model_type", found=kind, supported=known)
    for key, allowed in family.only.items():
        if hf_config.get(key) not in allowed:
            raise HFUnsupported(model="gpt", key=key, found=hf_config[key], supported=repr(allowed[0]))
    missing = [theirs for theirs in family.keys.values() if theirs not in hf_config]
    if missing:
        raise HFFileDamaged(path="config.json", reason=f"it has no {', '.join(missing)}")
    ours = {key: hf_config[theirs] for key, theirs in family.keys.items()}
    ours |= {key: hf_config.get(theirs, default) for key, (theirs, default) in family.optional_keys.items()}
    ours |= {"make_vocab_size_divisible_by": 1, "use_scaled_init_method": False}
    return ours | dict(family.from_hf(hf_config))


def names_in_hf(hf_config: Mapping[str, Any]) -> dict[str, str]:
    """Ours → theirs, of a file that :func:`config_from_hf` has read."""
    family = next(family for family in FAMILIES.values() if family.model_type == hf_config["model_type"])
    return dict(family.keys) | {ours: theirs for ours, (theirs, _) in family.optional_keys.items()}
