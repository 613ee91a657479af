"""The model that layers and losses belong to: NxD Core's functions take neither a model nor a configuration."""

from __future__ import annotations

from nxdt_core.protocols.parallel.called import CalledModel

__all__ = ["current_model", "set_current_model"]

_MODELS: list[CalledModel] = []


def current_model() -> CalledModel | None:
    """Return the model that was initialised last; None before that."""
    return _MODELS[-1] if _MODELS else None


def set_current_model(model: CalledModel | None) -> None:
    """Remember ``model`` for :func:`current_model`."""
    _MODELS[:] = [] if model is None else [model]
