"""Callbacks that Lightning adds to every run by itself: entry points of distributions that need not know nxdt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions

from nxdt_core.errors.plugins import LightningCallbacksRefused
from nxdt_core.kernel.discovery.metadata import read_metadata_file
from nxdt_core.kernel.policy import PluginPolicy

__all__ = ["GROUPS", "LightningFactory", "check_lightning_callbacks", "lightning_callbacks", "lightning_notes"]

GROUPS = ("pytorch_lightning.callbacks_factory", "lightning.pytorch.callbacks_factory")
"""Of Lightning under its two names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningFactory:
    """One entry point that Lightning calls for callbacks."""

    name: str
    dist: str
    version: str
    target: str


def lightning_callbacks() -> list[LightningFactory]:
    """Return the entry points of installed distributions; none of their code runs."""
    found: dict[tuple[str, str], LightningFactory] = {}
    for dist in distributions():
        for entry in _entries(read_metadata_file(dist, "entry_points.txt") or "", dist):
            name = str(dist.metadata["Name"])
            factory = LightningFactory(name=entry.name, dist=name, version=str(dist.version), target=entry.value)
            found.setdefault((name, entry.value), factory)
    return sorted(found.values(), key=lambda factory: (factory.dist, factory.name))


def check_lightning_callbacks(policy: PluginPolicy, factories: Iterable[LightningFactory]) -> None:
    """Check that the policy admits each factory: ``plugins.block`` and ``plugins.allow`` by distribution.

    Raises:
        LightningCallbacksRefused: the policy keeps one out.
    """
    reasons = [(each, policy.objection(name=each.name, dist=each.dist)) for each in factories]
    refused = [(each, reason) for each, reason in reasons if reason is not None]
    if refused:
        raise LightningCallbacksRefused(
            names=", ".join(f"{each.dist} {each.version}" for each, _ in refused),
            reasons=", ".join(sorted({reason for _, reason in refused})),
        )


def lightning_notes(factories: Iterable[LightningFactory]) -> list[str]:
    """Return a line for each factory."""
    return [
        f"Lightning adds callbacks of {each.dist} {each.version} ({each.target}) to every run" for each in factories
    ]


def _entries(text: str, dist: object) -> list[EntryPoint]:
    """Entry points of the two groups; nothing of a file that cannot be parsed, which Lightning does not load either."""
    if not any(group in text for group in GROUPS):
        return []
    return [entry for entry in dist.entry_points if entry.group in GROUPS]  # type: ignore[attr-defined]
