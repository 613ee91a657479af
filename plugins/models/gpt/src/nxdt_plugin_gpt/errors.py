"""Errors of the GPT plugin."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

NoHuggingFaceForm = NxdtError.define(
    "NXDT-M071",
    "No architecture of Hugging Face's computes what the configured model does.",
    "This GPT has no Hugging Face form: {listed}.",
    "Export a model with layer norm, biases and gelu, either pre_ln with learned positions (GPT-2) or pre_ln or"
    " gpt_j with rotary ones (GPT-NeoX); others stay in nxdt's own checkpoints.",
    also=lambda error: {
        "listed": "; ".join(f"{name} has no {', no '.join(lacking)}" for name, lacking in error.obstacles.items())
    },
)
