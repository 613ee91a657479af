"""Reads what a run wrote into its directory. A file that is missing or cut short gives what can be read of it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import isfile, realpath
from pathlib import Path

from nxdt_core.errors.training import NotARunDirectory
from nxdt_core.run.metric_files import Row, json_object, lines_of, numbers_of, rows_by_step

Series = dict[int, float]
"""Value by step."""

_EVENT = re.compile(r"(?P<time>[\d-]+ [\d:]+),\d+ (?P<level>[A-Z]+) rank (?P<rank>\d+) [\w.]+: (?P<text>.*)")
_TOLD = re.compile(r"resum|starting from|stop|skipped|not finite|plugins |learning rate|average|damaged|fall")
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
    """Curves by ``FILE:COLUMN``, such as ``metrics:loss``; those of a validation set by ``validation:loss/NAME``."""
    last_step: int | None
    values: Mapping[str, str]
    """Configuration as text by key."""
    origins: Mapping[str, str]
    """Origin of each key for which ``config.yaml`` has one."""
    versions: Mapping[str, str]
    """Versions by distribution, of the newest checkpoint that can be read."""
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
    if not isfile(directory / "metrics.jsonl") and not isfile(directory / "config.yaml"):
        raise NotARunDirectory(path=str(directory))
    metrics = _rows(directory / "metrics.jsonl")
    validation = _rows(directory / "validation.jsonl")
    saves = _rows(directory / "saves.jsonl")
    curves = {**_curves("metrics", metrics), **_curves("validation", validation), **_curves("saves", saves)}
    values, origins = _configuration(_lines(directory / "config.yaml"))
    versions, facts = _checkpoint(directory)
    return Run(
        directory=directory,
        name=Path(realpath(directory)).name,
        curves=curves,
        last_step=max((row["step"] for row in metrics), default=None),
        values=values,
        origins=origins,
        versions=versions,
        facts=facts,
        events=tuple(_events(directory, metrics)),
        generations=tuple(_generations(directory)),
    )


def _lines(path: Path) -> Iterator[str]:
    with suppress(OSError):
        yield from lines_of(path)


def _rows(path: Path) -> list[Row]:
    return rows_by_step(_lines(path))


def _paths(directory: Path, pattern: str) -> list[Path]:
    """Paths that match, sorted; as many as can be listed while the directory may be going away."""
    found: list[Path] = []
    with suppress(OSError):
        found.extend(directory.glob(pattern))
    return sorted(found)


def _curves(name: str, rows: list[Row]) -> dict[str, Series]:
    curves: dict[str, Series] = {}
    for row in rows:
        for column, suffix, number in numbers_of(row):
            if column not in _COUNTERS:
                curves.setdefault(f"{name}:{column}{suffix}", {})[row["step"]] = number
    return curves


def _configuration(lines: Iterator[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Value and origin of each key, read line by line, since the origins are comments."""
    values, origins = {}, {}
    above: list[tuple[int, str]] = []
    for line in lines:
        text, _, origin = line.rpartition("  # ") if "  # " in line else (line, "", "")
        key, colon, value = text.lstrip(" ").partition(":")
        if not colon or not key or key[0] in "#\t" or (value and value[0] != " "):
            continue
        indent, key, value = len(text) - len(text.lstrip(" ")), key.strip(), value.strip()
        above = [(depth, name) for depth, name in above if depth < indent]
        path = ".".join([*(name for _, name in above), key])
        if value:
            values[path], origins[path] = value, origin
        else:
            above.append((indent, key))
    return values, origins


def _checkpoint(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Versions, layout and fingerprint from the newest manifest below the run's own directory of checkpoints."""
    for path in reversed(_paths(directory, "checkpoints/step-*/manifest.json")):
        manifest = {} if path.parent.is_symlink() else json_object("\n".join(_lines(path)))
        versions, mesh = manifest.get("versions"), manifest.get("mesh")
        if isinstance(versions, dict) and isinstance(mesh, dict):
            facts = {
                "newest checkpoint": f"step {manifest.get('step')}, {manifest.get('created')}",
                "layout": " ".join(f"{name}={size}" for name, size in mesh.items()),
                "plugins' fingerprint": str(manifest.get("plugin_fingerprint", "")),
            }
            return {name: str(version) for name, version in versions.items()}, facts
    return {}, {}


def _events(directory: Path, metrics: list[Row]) -> Iterable[tuple[str, str, str]]:
    """Warnings, errors and turning points from the first rank's log, and steps whose update was skipped."""
    found: deque[tuple[str, str, str]] = deque(maxlen=_MOST_EVENTS)
    for path in _paths(directory, "logs/globalrank-0_*.txt"):
        for line in _lines(path):
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
    replaced = sum(type(json_object(line).get("step")) is int for line in _lines(directory / "metrics.replaced.jsonl"))
    if replaced:
        found.append(("", "info", f"{replaced} logged steps were repeated after a resume (metrics.replaced.jsonl)"))
    return found


def _generations(directory: Path) -> Iterator[tuple[int, str, str]]:
    rows = map(json_object, _lines(directory / "generations.jsonl"))
    for row in deque((row for row in rows if type(row.get("step")) is int), maxlen=12):
        yield row["step"], str(row.get("prompt", "")), str(row.get("text", ""))
