"""Reads what a run wrote into its directory. A file that is missing or cut short gives what can be read of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxdt_core.errors.training import NotARunDirectory
from nxdt_core.regular_files import regular_opener

__all__ = ["Run", "Series", "read_run"]

Series = dict[int, float]
"""Value by step."""

_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:#][^:]*):(?: +(?P<value>.*?))?(?: {2,}# (?P<origin>.*))?$")
_EVENT = re.compile(r"(?P<time>[\d-]+ [\d:]+),\d+ (?P<level>[A-Z]+) rank (?P<rank>\d+) [\w.]+: (?P<text>.*)")
_TOLD = re.compile(
    r"resum|starting from|stop|skipped|not finite|plugins |Lightning adds|learning rate|average|damaged|fall"
)
"""Information that is an event; warnings and errors always are."""
_MOST_EVENTS = 200
_COUNTERS = frozenset({"step", "consumed_samples", "consumed_tokens", "tokens", "pairs"})
"""Columns that have no curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records of one run."""

    directory: Path
    name: str
    curves: Mapping[str, Series]
    """By ``FILE:COLUMN``, such as ``metrics:loss``; of a validation set ``validation:loss/NAME``."""
    last_step: int | None
    values: Mapping[str, str]
    """Configuration as text by key."""
    origins: Mapping[str, str]
    """Where each key comes from, where ``config.yaml`` says it."""
    versions: Mapping[str, str]
    """By distribution, of the newest checkpoint that can be read."""
    facts: Mapping[str, str]
    """Layout and fingerprint of the same checkpoint."""
    events: tuple[tuple[str, str, str], ...] = ()
    """Time, level and text."""
    generations: tuple[tuple[int, str, str], ...] = field(default=())
    """Step, prompt and text of the newest samples."""


def read_run(directory: Path) -> Run:
    """Return the records below the directory of a run.

    Raises:
        NotARunDirectory: it has neither metrics nor a configuration.
    """
    if not (directory / "metrics.jsonl").is_file() and not (directory / "config.yaml").is_file():
        raise NotARunDirectory(path=str(directory))
    metrics = _rows(directory / "metrics.jsonl")
    validation = _rows(directory / "validation.jsonl")
    saves = _rows(directory / "saves.jsonl")
    curves = {**_curves("metrics", metrics), **_curves("validation", validation), **_curves("saves", saves)}
    values, origins = _configuration(_text(directory / "config.yaml"))
    versions, facts = _checkpoint(directory)
    return Run(
        directory=directory,
        name=directory.resolve().name,
        curves=curves,
        last_step=max((row["step"] for row in metrics), default=None),
        values=values,
        origins=origins,
        versions=versions,
        facts=facts,
        events=tuple(_events(directory, metrics)),
        generations=tuple(_generations(directory)),
    )


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular_opener) as file:
            return file.read()
    except OSError:
        return ""


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows by step; after a resume the last row of a step counts, and a row that a crash cut short does not."""
    found: dict[int, dict[str, Any]] = {}
    for line in _text(path).splitlines():
        row = _json(line)
        if type(row.get("step")) is int:
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def _json(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _curves(name: str, rows: list[dict[str, Any]]) -> dict[str, Series]:
    curves: dict[str, Series] = {}
    for row in rows:
        sets = row.get("sets")
        parts = [("", row), *((f"/{key}", part) for key, part in (sets if isinstance(sets, dict) else {}).items())]
        for suffix, part in parts:
            for column, value in part.items() if isinstance(part, dict) else ():
                if column not in _COUNTERS and isinstance(value, int | float) and not isinstance(value, bool):
                    curves.setdefault(f"{name}:{column}{suffix}", {})[row["step"]] = float(value)
    return curves


def _configuration(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Value and origin of each key, read line by line, since the origins are comments."""
    values, origins = {}, {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None or line.startswith("#"):
            continue
        indent, key = len(found["indent"]), found["key"].strip()
        above = [(depth, name) for depth, name in above if depth < indent]
        path = ".".join([*(name for _, name in above), key])
        if found["value"]:
            values[path] = found["value"].strip()
            origins[path] = found["origin"] or ""
        else:
            above.append((indent, key))
    return values, origins


def _checkpoint(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Versions, layout and fingerprint from the newest manifest below the run's own directory of checkpoints."""
    for path in sorted((directory / "checkpoints").glob("step-*/manifest.json"), reverse=True):
        manifest = _json(_text(path))
        versions, mesh = manifest.get("versions"), manifest.get("mesh")
        if isinstance(versions, dict) and isinstance(mesh, dict):
            facts = {
                "newest checkpoint": f"step {manifest.get('step')}, {manifest.get('created')}",
                "layout": " ".join(f"{name}={size}" for name, size in mesh.items()),
                "plugins' fingerprint": str(manifest.get("plugin_fingerprint", "")),
            }
            return {str(name): str(version) for name, version in versions.items()}, facts
    return {}, {}


def _events(directory: Path, metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Warnings, errors and turning points from the first rank's log, and steps whose update was skipped."""
    found = []
    for path in sorted((directory / "logs").glob("globalrank-0_*.txt")):
        for line in _text(path).splitlines():
            event = _EVENT.fullmatch(line)
            if event is not None and (event["level"] != "INFO" or _TOLD.search(event["text"])):
                found.append((event["time"], event["level"].lower(), event["text"]))
    before = 0
    for row in metrics:
        skipped = row.get("skipped_steps")
        if isinstance(skipped, int) and skipped > before:
            found.append(
                (f"step {row['step']}", "warning", f"{skipped - before} steps skipped, their gradients not finite")
            )
        before = skipped if isinstance(skipped, int) else before
    replaced = len(_rows(directory / "metrics.replaced.jsonl"))
    if replaced:
        found.append(("", "info", f"{replaced} logged steps were repeated after a resume (metrics.replaced.jsonl)"))
    yield from found[-_MOST_EVENTS:]


def _generations(directory: Path, newest: int = 12) -> Iterator[tuple[int, str, str]]:
    rows = [_json(line) for line in _text(directory / "generations.jsonl").splitlines()]
    whole = [row for row in rows if type(row.get("step")) is int]
    for row in whole[-newest:]:
        yield row["step"], str(row.get("prompt", "")), str(row.get("text", ""))
