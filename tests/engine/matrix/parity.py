"""Compares what a rank computed with what one process computes on the same global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.engine.matrix.layouts import Numbers
from tests.engine.matrix.training import Report


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest absolute differences; losses are between 2 and 5 nats, norms and weights below 3."""

    loss: float
    norm: float
    gradient: float
    weight: float


TOLERANCES: dict[Numbers, Tolerance] = {
    "float64": Tolerance(loss=1e-9, norm=1e-9, gradient=1e-9, weight=1e-9),
    "fp32": Tolerance(loss=1e-5, norm=1e-4, gradient=1e-5, weight=1e-4),
}


def differences(report: Report, reference: Report, tolerance: Tolerance) -> Iterator[str]:
    """Sentences about what differs; none where the rank agrees."""
    yield from _curve("loss", report.losses, reference.losses, tolerance.loss)
    yield from _curve("gradient norm", report.norms, reference.norms, tolerance.norm)
    yield from _curve("norm of the weights", report.weight_norms, reference.weight_norms, tolerance.norm)
    if report.figures.keys() != reference.figures.keys():
        yield f"metrics {sorted(report.figures)} instead of {sorted(reference.figures)}"
    for name in report.figures.keys() & reference.figures.keys():
        yield from _curve(name, report.figures[name], reference.figures[name], tolerance.loss)
    for name, gradient in report.gradients.items():
        yield from _tensor(f"gradient of {name}", gradient, reference.gradients[name], tolerance.gradient)
    for name, weight in report.weights.items():
        yield from _tensor(name, weight, reference.weights[name], tolerance.weight)


def missing(reports: Sequence[Report], reference: Report) -> list[str]:
    """Parameters of which no rank reported a weight or a gradient."""
    weights = {name for report in reports for name in report.weights}
    gradients = {name for report in reports for name in report.gradients}
    return sorted((reference.weights.keys() - weights) | (reference.gradients.keys() - gradients))


def _curve(what: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> Iterator[str]:
    differences = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    step, worst = max(enumerate(differences), key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))
    if not worst <= tolerance:
        first = next(step for step, difference in enumerate(differences) if not difference <= tolerance)
        yield f"{what}: off by {differences[first]:.1e} from step {first}, by {worst:.1e} at step {step}"


def _tensor(what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Iterator[str]:
    if found.shape != wanted.shape:
        yield f"{what}: shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        return
    worst = (found - wanted).abs().max().item()
    if not worst <= tolerance:
        yield f"{what}: off by {worst:.1e} of {wanted.abs().max().item():.1e}"
