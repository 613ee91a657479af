"""What ``torch.compile`` could not do with a layer: codes ``NXDT-P09…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["LayerNotWhole", "TooManyGraphs"]


class LayerNotWhole(NxdtError):
    """A layer with code that cannot be traced; logged as a warning."""

    code = "NXDT-P090"
    happened = (
        "model.compile: the layer '{path}' ({layer}) is not one graph, and layers of this class are compiled in "
        "pieces, with less gain. torch says: {reason}."
    )
    remedy = "Change the code that it names, or set model.compile to false."
    path: str
    layer: str
    reason: str


class TooManyGraphs(NxdtError):
    """A layer that was compiled too often; logged as a warning."""

    code = "NXDT-P091"
    happened = (
        "model.compile: the layer '{path}' ({layer}) asked for another graph at every change, and layers of this "
        "class run without compilation from now on. torch says: {reason}."
    )
    remedy = "Run with TORCH_LOGS=recompiles to see what changes, or set model.compile to false."
    path: str
    layer: str
    reason: str
