"""``nxdt report`` and ``nxdt watch``: the page of runs, written once or served while they train.

It shows what a run wrote into its directory. A file that is missing or cut short gives what can be read of it.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from os.path import isfile, realpath
from pathlib import Path
from typing import Any

import click

from nxdt_core.cli.report_plot import COLOURS, POLICY, Content, Markup, document, element, plot
from nxdt_core.cli.verb import say, verb
from nxdt_core.errors.training import CannotServeReport, CannotWriteReport, NotARunDirectory
from nxdt_core.run.metric_rows import json_object, lines_of, numbers_of, rows_by_step
from nxdt_core.system.http_server import Handler, Server
from nxdt_core.system.regular_files import regular_opener

Series = dict[int, float]
"""Value by step."""

_EVENT = re.compile(r"(?P<time>[\d-]+ [\d:]+),\d+ (?P<level>[A-Z]+) rank (?P<rank>\d+) [\w.]+: (?P<text>.*)")
_TOLD = re.compile(r"resum|starting from|stop|skipped|not finite|plugins |learning rate|average|damaged|fall")
"""Information that is an event; warnings and errors always are."""
_MOST_EVENTS = 200
_COUNTERS = frozenset({"step", "consumed_samples", "consumed_tokens", "tokens", "pairs"})
"""Columns that have no curve."""
_HOST = "127.0.0.1"
_REFRESH_S = 10
_CHARTS = (
    ("Loss", ("metrics:loss", "validation:loss"), False),
    ("Learning rate", ("metrics:lr",), False),
    ("Gradient norm", ("metrics:grad_norm",), True),
    ("Tokens per second", ("metrics:tokens_per_s",), False),
    ("MFU", ("metrics:mfu",), False),
    ("Peak memory, GiB", ("metrics:max_memory_bytes",), False),
    ("Step time, seconds", ("metrics:step_time_s",), False),
    ("Wait for data, seconds", ("metrics:data_wait_s",), False),
    ("Training blocked by a checkpoint, seconds", ("saves:blocked_s",), False),
    ("Duration of a save, seconds", ("saves:seconds",), False),
    ("Size of a checkpoint, GiB", ("saves:bytes",), False),
    ("Validation perplexity", ("validation:perplexity",), False),
)
"""Title, columns, and whether the axis is logarithmic. Further columns follow with their own names."""
_MEMORY = (
    "Measured: on a GPU the peak of torch's allocator, on a CPU that of the whole process. nxdt plan counts tensors."
)
_SHOWN = ("metrics:loss", "validation:loss", "metrics:tokens_per_s", "metrics:lr", "metrics:grad_norm")
_LEFT_OUT = frozenset({"metrics:mfu_palm", "saves:gb_per_s", "saves:slowdown"})
_OF_SAVES = "metrics:checkpoint_"
"""Columns that ``saves.jsonl`` has, too."""
_GIB, _MIB = 2**30, 2**20


_runs = click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))


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
    environment: Mapping[str, str]
    """Layout, fingerprint, and versions by distribution, of the newest checkpoint that can be read."""
    events: tuple[tuple[str, str, str], ...] = ()
    """Time, level and text."""
    generations: tuple[tuple[int, str, str, str], ...] = ()
    """Step, prompt, text and scores of the newest samples."""


def read_run(directory: Path) -> Run:
    """Return the records below the directory of a run.

    Raises:
        NotARunDirectory: it has neither metrics nor a configuration.
    """
    if not isfile(directory / "metrics.jsonl") and not isfile(directory / "config.yaml"):
        raise NotARunDirectory(path=str(directory))
    curves: dict[str, Series] = {}
    rows = {name: rows_by_step(_lines(directory / f"{name}.jsonl")) for name in ("metrics", "validation", "saves")}
    for file, rows_of_file in rows.items():
        for row in rows_of_file:
            for column, suffix, number in numbers_of(row):
                if column not in _COUNTERS:
                    curves.setdefault(f"{file}:{column}{suffix}", {})[row["step"]] = number

    values, origins = _read_configuration(_lines(directory / "config.yaml"))

    # From the newest manifest below the run's own directory of checkpoints.
    environment: dict[str, str] = {}
    for path in reversed(_paths(directory, "checkpoints/step-*/manifest.json")):
        manifest = {} if path.parent.is_symlink() else json_object("\n".join(_lines(path)))
        versions, mesh = manifest.get("versions"), manifest.get("mesh")
        if isinstance(versions, dict) and isinstance(mesh, dict):
            environment = {
                "newest checkpoint": f"step {manifest.get('step')}, {manifest.get('created')}",
                "layout": " ".join(f"{name}={size}" for name, size in mesh.items()),
                "plugins' fingerprint": str(manifest.get("plugin_fingerprint", "")),
                **{name: str(version) for name, version in versions.items()},
            }
            break

    # Warnings, errors and turning points from the first rank's log, and steps whose update was skipped.
    events: deque[tuple[str, str, str]] = deque(maxlen=_MOST_EVENTS)
    for path in _paths(directory, "logs/globalrank-0_*.txt"):
        for event in map(_EVENT.fullmatch, _lines(path)):
            if event is not None and (event["level"] != "INFO" or _TOLD.search(event["text"])):
                events.append((event["time"], event["level"].lower(), event["text"]))
    before = 0
    for row in rows["metrics"]:
        skipped = row.get("skipped_steps")
        skipped = skipped if isinstance(skipped, int) else before
        if skipped > before:
            text = f"{skipped - before} steps skipped, their gradients not finite"
            events.append((f"step {row['step']}", "warning", text))
        before = skipped
    replaced = sum(type(json_object(line).get("step")) is int for line in _lines(directory / "metrics.replaced.jsonl"))
    if replaced:
        events.append(("", "info", f"{replaced} logged steps were repeated after a resume (metrics.replaced.jsonl)"))

    samples = (row for row in map(json_object, _lines(directory / "generations.jsonl")) if type(row.get("step")) is int)
    return Run(
        directory=directory,
        name=Path(realpath(directory)).name,
        curves=curves,
        last_step=max((row["step"] for row in rows["metrics"]), default=None),
        values=values,
        origins=origins,
        environment=environment,
        events=tuple(events),
        generations=tuple(
            (row["step"], str(row.get("prompt", "")), str(row.get("text", "")), _scores(row))
            for row in deque(samples, maxlen=12)
        ),
    )


def _scores(row: Mapping[str, Any]) -> str:
    """Return the rewards and the advantage of a sample as text; empty for one that was not scored."""
    rewards = row.get("rewards")
    scores = {**(rewards if isinstance(rewards, dict) else {}), "advantage": row.get("advantage")}
    return ", ".join(f"{name} {score:.4g}" for name, score in scores.items() if isinstance(score, int | float))


def _lines(path: Path) -> Iterator[str]:
    with suppress(OSError):
        yield from lines_of(path)


def _paths(directory: Path, pattern: str) -> list[Path]:
    """Paths that match, sorted; as many as can be listed while the directory may be going away."""
    paths: list[Path] = []
    with suppress(OSError):
        paths.extend(directory.glob(pattern))
    return sorted(paths)


def _read_configuration(lines: Iterator[str]) -> tuple[dict[str, str], dict[str, str]]:
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


@verb("nxdt report nxdt_experiments/llama-tiny", "nxdt report runs/a runs/b -o compare.html")
@_runs
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; by default RUN_DIR/report.html.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML page about runs: curves, configuration with origins and differences, plugins, events, samples.

    The page is one self-contained file. Several runs share each plot.
    """
    text = page([read_run(run) for run in runs])
    output = output or runs[0] / "report.html"
    try:
        with open(output, "w", encoding="utf-8", errors="replace", opener=regular_opener) as file:
            file.write(text)
    except OSError as error:
        raise CannotWriteReport(path=str(output), reason=error.strerror or str(error)) from error
    say(f"wrote {output}")


@verb("nxdt watch nxdt_experiments/llama-tiny", "nxdt watch runs/a runs/b --port 9000")
@_runs
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8077,
    help="Port on 127.0.0.1, by default 8077; 0 takes a free one.",
)
def watch(runs: tuple[Path, ...], port: int) -> None:
    """Serve the page of `nxdt report` on 127.0.0.1 until Ctrl-C. Each request reads the runs again.

    A browser reloads the page every 10 seconds. Other machines cannot reach it: use ssh -L for a remote run.
    """
    for run in runs:
        read_run(run)

    class ReportHandler(Handler):
        def respond(self) -> None:
            """Answer the one page, or one that says which directory is gone; both load again."""
            if self.path != "/":
                self.answer(404, "text/plain", "There is only /.\n")
                return
            try:
                status, text = 200, page([read_run(run) for run in runs], refresh_s=_REFRESH_S)
            except NotARunDirectory as error:
                status, text = 503, document("No report", element("pre", str(error)), refresh_s=_REFRESH_S)
            policy = f"{POLICY}; frame-ancestors 'none'"
            self.answer(status, "text/html; charset=utf-8", text, Content_Security_Policy=policy)

    try:
        server = Server(_HOST, port, ReportHandler)
    except OSError as error:
        raise CannotServeReport(port=port, reason=error.strerror or str(error)) from error
    with server:
        say(f"serving http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)")
        sys.stdout.flush()
        server.serve_forever()


def page(runs: Sequence[Run], *, refresh_s: int | None = None) -> str:
    """Return the HTML of a report on at least one run, which a browser loads again every ``refresh_s`` seconds."""
    rows: list[list[Content]] = []
    for run in runs:
        goal = run.values.get("trainer.max_steps", "")
        step = "-" if run.last_step is None else f"{run.last_step}{f' of {goal}' if goal else ''}"
        points = [run.curves.get(column) for column in _SHOWN]
        last = [f"{values[max(values)]:.5g}" if values else "-" for values in points]
        rows.append([run.name, step, *last, str(run.directory)])
    head = ["Run", "Step", "Loss", "Validation loss", "Tokens/s", "Learning rate", "Gradient norm", "Directory"]
    content: list[Content] = [_legend([(number, run.name) for number, run in enumerate(runs)]), _table(head, rows)]

    content += [element("h2", "Curves"), _dim("Over the optimizer steps.")]
    content += [element("div", _plots(runs), class_="grid-of-plots"), _configuration(runs)]

    content.append(element("h2", "Plugins and environment"))
    names = dict.fromkeys(name for run in runs for name in run.environment)
    rows = [[name, *(run.environment.get(name, "-") for run in runs)] for name in names]
    titles = ["", *(run.name for run in runs)]
    content.append(_table(titles, rows) if rows else _dim("No checkpoint to read them from."))

    content.append(element("h2", "Events"))
    for run in runs:
        rows = [[time, element("span", level, class_=level), text] for time, level, text in run.events]
        content += [element("h3", run.name), _table(["Time", "Level", "What"], rows)]

    if any(run.generations for run in runs):
        content.append(element("h2", "Samples"))
    for run in runs:
        for number, prompt, text, scores in run.generations:
            title = f"{run.name}, step {number}{scores and f': {scores}'}"
            content += [element("h3", title), element("pre", element("b", prompt), text)]
    return document(", ".join(run.name for run in runs), *content, refresh_s=refresh_s)


def _legend(lines: Sequence[tuple[int, str]]) -> Markup:
    items = [element("li", element("span", class_=f"b{colour % COLOURS}"), name) for colour, name in lines]
    return element("ul", items, class_="legend")


def _plots(runs: Sequence[Run]) -> Iterator[Markup]:
    named = {column for _, columns, _ in _CHARTS for column in columns} | _LEFT_OUT
    others = dict.fromkeys(
        column for run in runs for column in run.curves if column not in named and not column.startswith(_OF_SAVES)
    )
    further = [(column.partition(":")[2].replace("_", " "), (column,), False) for column in others]
    for chart, columns, log in (*_CHARTS, *further):
        values = [value for run in runs for column in columns for value in run.curves.get(column, {}).values()]
        title = chart.replace("GiB", "MiB") if max(values, default=_GIB) < _GIB / 10 else chart
        unit = {"GiB": _GIB, "MiB": _MIB}.get(title.rpartition(" ")[2], 1)
        lines = []
        for (number, run), column in product(enumerate(runs), columns):
            validates = column.startswith("validation")
            colour = number + (len(runs) if validates and len(columns) > 1 else 0)
            points = {step: value / unit for step, value in run.curves.get(column, {}).items()}
            if column in run.curves:
                lines.append((colour, f"{run.name}: {'validation' if validates else 'training'}", points))
        picture = plot(lines, label=title, log=log)
        if picture is not None:
            legend = _legend([(colour, name) for colour, name, _ in lines]) if len(columns) > 1 else None
            note = _dim(_MEMORY) if columns == ("metrics:max_memory_bytes",) else None
            yield element("figure", element("h3", title, ", log scale" if log else None), picture, legend, note)


def _configuration(runs: Sequence[Run]) -> Iterator[Markup]:
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    differing = [key for key in keys if len({run.values.get(key) for run in runs}) > 1]
    head = ["Key", *(run.name for run in runs), "From"]
    yield element("h2", "Configuration")
    if len(runs) > 1:
        yield from (element("h3", "Differences"), _table(head, _key_rows(runs, differing), differs=True))
    written = [{key for key in run.values if not run.origins.get(key, "").startswith("default")} for run in runs]
    chosen = [key for key in keys if any(key in names for names in written)]
    for title, shown, opened in (("Keys that are set", chosen, ""), ("All keys", keys, None)):
        summary = element("summary", f"{title} ({len(shown)})")
        yield element("details", summary, _table(head, _key_rows(runs, shown)), open=opened)


def _key_rows(runs: Sequence[Run], keys: Sequence[str]) -> list[list[Content]]:
    rows: list[list[Content]] = []
    for key in keys:
        origins = dict.fromkeys(run.origins.get(key, "") for run in runs)
        values = (element("code", run.values[key]) if key in run.values else "-" for run in runs)
        rows.append([element("code", key), *values, ", ".join(filter(None, origins))])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[Content]], *, differs: bool = False) -> Markup:
    if not rows:
        return _dim("None.")
    mark = "differs" if differs else None
    lines = [
        element("tr", element("td", cells[0], class_="key"), [element("td", cell) for cell in cells[1:]], class_=mark)
        for cells in rows
    ]
    titles = element("tr", [element("th", title) for title in head])
    return element("div", element("table", element("thead", titles), element("tbody", lines)), class_="wide")


def _dim(text: str) -> Markup:
    return element("p", text, class_="dim")
