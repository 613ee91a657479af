"""Errors of this plugin: codes ``NXDT-M07…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

NoHFForm = NxdtError.define(
    "NXDT-M070",
    "A model that transformers' ``MixtralForCausalLM`` would compute otherwise.",
    "The model has {key} = {found!r}, and the Mixtral of transformers only knows {wanted!r}.",
    "It has no Hugging Face form; keep its checkpoints, or train with {key}={wanted}.",
)
