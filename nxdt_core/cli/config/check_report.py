"""``nxdt config check --json``, for editors and CI. Keys are only ever added."""

from __future__ import annotations

from collections.abc import Sequence

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem

__all__ = ["as_object", "failed_as_object"]


def as_object(config: ResolvedConfig, notes: Sequence[str], to_set: Sequence[str]) -> dict[str, object]:
    """Return what would run; ``to_set`` names the values that are placeholders."""
    used = {slot: found.component for slot, found in config.components.items() if found is not None}
    return {
        "source": config.source,
        "ok": not to_set,
        "problems": [],
        "notes": list(notes),
        "to_set": list(to_set),
        "components": {
            slot: {"name": chosen.record.name, "dist": chosen.dist, "version": chosen.version}
            for slot, chosen in used.items()
        },
        "run_dir": str(config.run_dir),
        "checkpoint_uri": config.checkpoint_uri,
    }


def failed_as_object(source: str, error: NxdtError) -> dict[str, object]:
    """Return what is wrong with a configuration, with the same keys."""
    problems = [_problem(each) for each in (error.problems if isinstance(error, ConfigError) else (error,))]
    nothing: dict[str, object] = {"notes": [], "to_set": [], "components": {}, "run_dir": None, "checkpoint_uri": None}
    return {"source": source, "ok": False, "problems": problems, **nothing}


def _problem(error: NxdtError) -> dict[str, object]:
    placed = error if isinstance(error, ConfigProblem) else None
    return {
        "code": placed.shown_code if placed else error.code,
        "place": placed.place if placed else None,
        "line": placed.line or None if placed else None,
        "key": placed.key or None if placed else None,
        "message": error.what(),
        "fix": error.do() or None,
    }
