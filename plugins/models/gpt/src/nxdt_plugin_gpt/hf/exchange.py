"""Correspondence to Hugging Face: which of its families a configuration is, and what these share. No torch here.

The families are in :mod:`nxdt_plugin_gpt.hf.gpt2` and :mod:`nxdt_plugin_gpt.hf.neox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_gpt.architecture import GPTArchitecture
from nxdt_plugin_gpt.errors import NoHuggingFaceForm
from nxdt_plugin_gpt.hf.family import HFFamily
from nxdt_plugin_gpt.hf.gpt2 import GPT2
from nxdt_plugin_gpt.hf.neox import GPT_NEOX

FAMILIES: Mapping[str, HFFamily] = {family.architecture: family for family in (GPT2, GPT_NEOX)}
"""Families by architecture."""

IGNORED = tuple(name for family in FAMILIES.values() for name in family.ignored)
"""Tensors that a directory may hold and no parameter needs: masks and rotary tables of old exports, and the head next
to a tied embedding (with an untied one the key map takes it)."""


_VOCABULARY = ("embedding.tokens.weight", "lm_head.weight")


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of :class:`GPTArchitecture` from those of a ``config.json``, written by transformers 4 or 5.

    Raises:
        HFUnsupported: the model is of another family or has a feature that is not implemented.
        HFFileDamaged: a size is missing.
    """
    kind = hf_config.get("model_type")
    family = next((family for family in FAMILIES.values() if family.model_type == kind), None)
    if family is None:
        known = " and ".join(repr(family.model_type) for family in FAMILIES.values())
        raise HFUnsupported(model="gpt", key="model_type", found=kind, supported=known)
    ours = family.values.read(hf_config)
    ours |= {"make_vocab_size_divisible_by": 1, "use_scaled_init_method": False}
    return ours | dict(family.from_hf(hf_config))


def names_in_hf(hf_config: Mapping[str, Any]) -> dict[str, str]:
    """Ours → theirs, of a file that :func:`config_from_hf` has read."""
    family = next(family for family in FAMILIES.values() if family.model_type == hf_config["model_type"])
    return family.values.names


def config_to_hf(config: GPTArchitecture) -> dict[str, Any]:
    """Return the ``config.json``, with keys that both transformers 4 and 5 read. Dropout behind the activation, which
    only training knows, has no place in it, nor have the rows that fill the vocabulary up.

    Raises:
        NoHuggingFaceForm: no family computes what this configuration does.
    """
    family = _family_of(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.values.write(config),
        **family.to_hf(config),
    }


def key_map(config: GPTArchitecture) -> tuple[KeyMap, ...]:
    """Return one entry per parameter, except a tied head. Rows that pad the vocabulary are not exchanged.

    Raises:
        NoHuggingFaceForm: no family has these parameters.
    """
    tied = config.share_embeddings_and_output_weights
    entries = (
        entry
        for entry in _family_of(config).key_map(config.num_attention_heads)
        if not (tied and entry.name == "lm_head.weight")
    )
    if config.vocab_rows == config.vocab_size:
        return tuple(entries)
    return tuple(
        replace(entry, transform="pad", sections=(config.vocab_size,)) if entry.name in _VOCABULARY else entry
        for entry in entries
    )


def _family_of(config: GPTArchitecture) -> HFFamily:
    obstacles = {family.architecture: list(family.obstacles(config)) for family in FAMILIES.values()}
    for architecture, found in obstacles.items():
        if not found:
            return FAMILIES[architecture]
    raise NoHuggingFaceForm(obstacles=obstacles)
