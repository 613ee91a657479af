"""Errors of what a run is compared with, the model that it began with: codes ``NXDT-A03…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = ["ReferenceLost", "ReferenceNeedsAdapter", "ReferenceNeedsLength"]


class ReferenceLost(NxdtError):
    """A run goes on without the figures of its beginning."""

    code = "NXDT-A030"
    happened = (
        "The run goes on, and {path} is not there or damaged: the log-probabilities under the weights that it began "
        "with, which cannot be computed from those that it has now."
    )
    remedy = "Put the directory 'reference' of the run back where it was, or begin a new run."
    path: str


class ReferenceNeedsLength(NxdtError):
    """Log-probabilities to be kept of samples without numbers."""

    code = "NXDT-A031"
    happened = (
        "The objective {objective!r} keeps the log-probabilities of every sample, and the data ({split}) are a stream."
    )
    remedy = "Train on data with a length, such as data.name: preference."
    objective: str
    split: str


class ReferenceNeedsAdapter(NxdtError):
    """A reference at every step, and no frozen base to be one."""

    code = "NXDT-A032"
    happened = (
        "The objective {objective!r} asks for the reference at every step, and there is no frozen base to be one: "
        "{which} of the model itself change."
    )
    remedy = "Set objective.precompute_ref_log_probs to true, or train an adapter (adapter.name: lora)."
    objective: str
    trained: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "which": listing(self.trained, 3) if self.trained else "all weights"}
