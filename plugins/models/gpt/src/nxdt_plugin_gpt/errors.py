"""Errors of the GPT plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxdt_core.errors import NxdtError

__all__ = ["NoHuggingFaceForm"]


class NoHuggingFaceForm(NxdtError):
    """No architecture of Hugging Face's computes what the configured model does."""

    code = "NXDT-M071"
    happened = "This GPT has no Hugging Face form: {listed}."
    remedy = (
        "Export a model with layer norm, biases and gelu, either pre_ln with learned positions (GPT-2) or pre_ln or"
        " gpt_j with rotary ones (GPT-NeoX); others stay in nxdt's own checkpoints."
    )
    obstacles: Mapping[str, Sequence[str]]
    """By architecture."""

    def _view(self) -> dict[str, Any]:
        parts = (f"{name} has no {', no '.join(found)}" for name, found in self.obstacles.items())
        return {**super()._view(), "listed": "; ".join(parts)}
