"""Which plugins a run may use: the ``plugins:`` section of the configuration, as the kernel takes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["PluginPolicy", "normalise"]


@lru_cache(maxsize=4096)
def normalise(dist: str) -> str:
    """Distribution name as package indices compare it (PEP 503): ``Nxdt_Plugin.X`` is ``nxdt-plugin-x``."""
    return re.sub(r"[-_.]+", "-", dist).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPolicy:
    """What may be loaded, and who is meant where several offer one name.

    Entries name a plugin by its entry point (``llama``) or by its distribution (``nxdt-plugin-llama``).
    """

    allow: tuple[str, ...] | None = None
    """None allows all; the built-ins and ``local`` files are always allowed."""
    block: tuple[str, ...] = ()
    """Never imported; wins over ``allow``."""
    schemes: tuple[str, ...] | None = None
    """Schemes of addresses that stores may serve; None allows all."""
    prefer: tuple[str, ...] = ()
    """Of several plugins that offer one short name, the first of these is meant."""
    local: tuple[Path, ...] = ()
    """Plugin files (``.py``) that are loaded by path."""
    lock: Path | None = None
    """Lock file that the set of plugins must equal."""

    def objection(self, *, name: str, dist: str) -> str | None:
        """Return why the policy keeps a plugin out, or None where it does not."""
        if any(names(entry, name=name, dist=dist) for entry in self.block):
            return "named in plugins.block"
        if self.allow is not None and not any(names(entry, name=name, dist=dist) for entry in self.allow):
            return "not named in plugins.allow"
        return None

    def entries(self) -> tuple[str, ...]:
        """Return every entry of ``allow``, ``block`` and ``prefer``, in that order."""
        return (*(self.allow or ()), *self.block, *self.prefer)


def names(entry: str, *, name: str, dist: str) -> bool:
    """Return whether a policy entry means the plugin ``name`` of the distribution ``dist``."""
    return entry == name or normalise(entry) == normalise(dist)
