"""Errors of losses that a head computes itself: codes ``NXDT-M09…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["HeadNotLinear", "LossesAreNotLogits", "ModelWithoutHead"]


class HeadNotLinear(NxdtError):
    """A head whose logits cannot be computed some tokens at a time."""

    code = "NXDT-M090"
    happened = (
        "model.loss_chunk_tokens is set, and the model's head '{path}' is a {kind}, which is no plain linear layer."
    )
    remedy = "Set model.loss_chunk_tokens to null, or leave the head as it is."
    path: str
    kind: str


class ModelWithoutHead(NxdtError):
    """A model whose plan names no head."""

    code = "NXDT-M091"
    happened = "model.loss_chunk_tokens is set, and the model's plan names no head (style vocab_head)."
    remedy = "Set model.loss_chunk_tokens to null, or name the output projection in the plan."


class LossesAreNotLogits(NxdtError):
    """Code that needs logits got the losses of a head that holds none."""

    code = "NXDT-M092"
    happened = "The model's head returns losses (model.loss_chunk_tokens), and what got them needs logits: {use}."
    remedy = "Set model.loss_chunk_tokens to null; it works with objectives that take cross_entropies alone."
    use: str
