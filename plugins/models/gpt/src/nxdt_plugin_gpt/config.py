"""Section ``model`` of a GPT. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_plugin_gpt.architecture import GPTArchitecture
from nxdt_plugin_gpt.hf import config_from_hf, names_in_hf


class GPTConfig(GPTArchitecture):
    """Architecture of a GPT; the names of the keys are those of NxD Training's Megatron models."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section from a Hugging Face ``config.json`` (``model.model_config``)."""
        return config_from_hf(hf)

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> dict[str, str]:
        """Return key of this section → key of that file."""
        return names_in_hf(hf)
