"""Which distribution offers a component or reads an architecture, where none that is installed does: our own plugins.

It serves one sentence, ``pip install nxdt-plugin-mixtral``, where a name is unknown. ``make offers`` writes the file
that is read here from the entry modules of the plugins. Plugins of third parties are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_name("first_party.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """One component of one distribution; the fields are those of its record."""

    kind: str
    dist: str
    name: str
    aliases: Sequence[str] = ()
    hf_architectures: Sequence[str] = ()
    uri_schemes: Sequence[str] = ()
    shown_by: Sequence[str] = ()


@cache
def _offers() -> tuple[_Offer, ...]:
    return tuple(_Offer(**row) for row in json.loads(_FILE.read_text(encoding="utf-8")))


def offering_dist(kind: str, name: str) -> str | None:
    """Return the distribution that offers the component, in any spelling of its name (``SFT_Chat``, ``Mixtral``)."""
    sought = _spelling(name)
    return next(
        (
            offer.dist
            for offer in _offers()
            if offer.kind == kind and sought in map(_spelling, (offer.name, *offer.aliases))
        ),
        None,
    )


def known_offers(kind: str) -> dict[str, list[str]]:
    """Return the names of the components of ``kind`` that each distribution offers, by distribution."""
    found: dict[str, list[str]] = {}
    for offer in _offers():
        if offer.kind == kind:
            found.setdefault(offer.dist, []).append(offer.name)
    return found


def reading_model(architecture: str) -> str | None:
    """Return the name of the model that is built from a Hugging Face ``config.json`` with that architecture.

    A model that names the architecture comes before one that has a pattern of it.
    """
    named = (offer.name for offer in _offers() if architecture in offer.hf_architectures)
    matching = (
        offer.name
        for offer in _offers()
        if any(fnmatchcase(architecture, pattern) for pattern in offer.hf_architectures)
    )
    return next(named, None) or next(matching, None)


def serving_dist(scheme: str) -> str | None:
    """Return the distribution that serves ``scheme://`` locations of checkpoints."""
    return next((offer.dist for offer in _offers() if scheme.lower() in offer.uri_schemes), None)


def showing_migrations() -> tuple[str, ...]:
    """Return the keys that show that a configuration is of a program which one of our plugins migrates."""
    return tuple(key for offer in _offers() for key in offer.shown_by)


def _spelling(name: str) -> str:
    return name.lower().replace("_", "-")
