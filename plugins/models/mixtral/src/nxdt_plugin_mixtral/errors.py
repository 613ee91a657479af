"""Errors of this plugin: codes ``NXDT-M07…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

__all__ = ["NoHFForm"]


class NoHFForm(NxdtError):
    """A model that transformers' ``MixtralForCausalLM`` would compute otherwise."""

    code = "NXDT-M070"
    happened = "The model has {key} = {found!r}, and the Mixtral of transformers only knows {wanted!r}."
    remedy = "It has no Hugging Face form; keep its checkpoints, or train with {key}={wanted}."
    key: str
    found: object
    wanted: object
