"""Errors of adapters and the weights below them: code ``NXDT-S091``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["AdapterOfAnotherBase"]


class AdapterOfAnotherBase(NxdtError):
    """An adapter was trained over other frozen weights than those that are there."""

    code = "NXDT-S091"
    happened = "The adapter at '{where}' was trained over other base weights than those of {base}."
    remedy = (
        "Name the base that it was trained over, with its step: checkpoint.resume_from with "
        "checkpoint.weight_init_only=true in a run, --base for generate, evaluate and merge-lora; without one, the "
        "run's own seed and model are its base."
    )
    where: str
    base: str
