"""``nxdt report`` and ``nxdt watch``: the page of runs, written once or served while they train."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from nxdt_core.cli.report_plot import COLOURS, Content, Markup, document, element, plot, policy
from nxdt_core.cli.report_records import Run, Series, read_run
from nxdt_core.cli.verb import Verb, say
from nxdt_core.errors.training import NotARunDirectory
from nxdt_core.system.http_server import Handler, Server

_HOST = "127.0.0.1"
_REFRESH_S = 10

_runs = click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.command(
    cls=Verb,
    examples=("nxdt report nxdt_experiments/llama-tiny", "nxdt report runs/a runs/b -o compare.html"),
)
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
    from nxdt_core.errors.training import CannotWriteReport
    from nxdt_core.system.regular_files import regular_opener

    text = page([read_run(run) for run in runs])
    output = output or runs[0] / "report.html"
    try:
        with open(output, "w", encoding="utf-8", errors="replace", opener=regular_opener) as file:
            file.write(text)
    except OSError as error:
        raise CannotWriteReport(path=str(output), reason=error.strerror or str(error)) from error
    say(f"wrote {output}")


@click.command(
    cls=Verb,
    examples=("nxdt watch nxdt_experiments/llama-tiny", "nxdt watch runs/a runs/b --port 9000"),
)
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
    from nxdt_core.errors.training import CannotServeReport

    for run in runs:
        read_run(run)
    try:
        server = Server(_HOST, port, _handler(runs))
    except OSError as error:
        raise CannotServeReport(port=port, reason=error.strerror or str(error)) from error
    with server:
        say(f"serving http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)")
        sys.stdout.flush()
        server.serve_forever()


def _handler(runs: Sequence[Path]) -> type[Handler]:
    class ReportHandler(Handler):
        def respond(self) -> None:
            """Answer the one page, or one that says which directory is gone; both load again."""
            if self.path != "/":
                self.answer(404, "text/plain", "There is only /.\n")
                return
            try:
                status, text = 200, page([read_run(run) for run in runs], refresh_s=_REFRESH_S)
            except NotARunDirectory as error:
                status, text = 503, notice(str(error), refresh_s=_REFRESH_S)
            policy = f"{POLICY}; frame-ancestors 'none'"
            self.answer(status, "text/html; charset=utf-8", text, Content_Security_Policy=policy)

    return ReportHandler


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
_SHOWN = ("loss", "val_loss", "tokens_per_s", "lr", "grad_norm")
_LEFT_OUT = frozenset({"metrics:mfu_palm", "saves:gb_per_s", "saves:slowdown"})
_OF_SAVES = "metrics:checkpoint_"
"""Columns that ``saves.jsonl`` has, too."""
_GIB, _MIB = 2**30, 2**20

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#dfe3e8;--card:#f6f8fa;--mark:#fff3c4;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#6e5d00}
@media (prefers-color-scheme:dark){:root{--bg:#0f1419;--fg:#e6e9ec;--dim:#9aa5b1;--line:#2d343c;--card:#171d24;
--mark:#3d3413;--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;--c5:#d2b53a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:24px;margin:8px 0}h2{font-size:19px;margin:32px 0 8px}h3{font-size:15px;margin:0 0 4px}
.dim{color:var(--dim)}.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0;padding:0;list-style:none}
.legend span{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.grid-of-plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
figure{margin:0;padding:10px;background:var(--card);border:1px solid var(--line);border-radius:8px;min-width:0}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:12px}
svg .grid{stroke:var(--line)}svg polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;background:var(--card)}td.key{white-space:nowrap}td{overflow-wrap:anywhere;min-width:90px}
tr.differs td{background:var(--mark)}code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);padding:10px;border-radius:8px;margin:4px 0 12px}
summary{cursor:pointer;padding:6px 0}.warning{color:var(--c1)}.error,.critical{color:var(--c4)}
""" + "".join(
    f"svg .s{n} polyline{{stroke:var(--c{n})}}svg .s{n} circle{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in range(COLOURS)
)
POLICY = policy(_STYLE)
"""Content-Security-Policy of a page."""


def page(runs: Sequence[Run], *, refresh_s: int | None = None) -> str:
    """Return the HTML of a report.

    Args:
        runs: at least one.
        refresh_s: seconds after which a browser loads the page again; None for never.
    """
    sections = (_summary(runs), _plots(runs), _configuration(runs), _environment(runs), _events(runs), _samples(runs))
    return _page(", ".join(run.name for run in runs), *sections, refresh_s=refresh_s)


def notice(text: str, *, refresh_s: int) -> str:
    """Return the HTML of a page that explains why there is no report yet; a browser reloads it after ``refresh_s``."""
    return _page("No report", element("pre", text), refresh_s=refresh_s)


def _page(title: str, *content: Content, refresh_s: int | None) -> str:
    return document(f"{title}: nxdt", element("h1", title), *content, style=_STYLE, refresh_s=refresh_s)


def _summary(runs: Sequence[Run]) -> Content:
    rows: list[list[Content]] = []
    for run in runs:
        goal = run.values.get("trainer.max_steps", "")
        step = "-" if run.last_step is None else f"{run.last_step}{f' of {goal}' if goal else ''}"
        last = [_last(run, column) for column in _SHOWN]
        rows.append([run.name, step, *last, str(run.directory)])
    head = ["Run", "Step", "Loss", "Validation loss", "Tokens/s", "Learning rate", "Gradient norm", "Directory"]
    return _legend([(number, run.name) for number, run in enumerate(runs)]), _table(head, rows)


def _last(run: Run, column: str) -> str:
    key = f"validation:{column.removeprefix('val_')}" if column.startswith("val_") else f"metrics:{column}"
    points = run.curves.get(key)
    return f"{points[max(points)]:.5g}" if points else "-"


def _legend(lines: Sequence[tuple[int, str]]) -> Markup:
    items = [element("li", element("span", class_=f"b{colour % COLOURS}"), name) for colour, name in lines]
    return element("ul", items, class_="legend")


def _plots(runs: Sequence[Run]) -> Iterator[Markup]:
    yield from (element("h2", "Curves"), element("p", "Over the optimizer steps.", class_="dim"))
    yield element("div", _metric_plots(runs), class_="grid-of-plots")


def _metric_plots(runs: Sequence[Run]) -> Iterator[Markup]:
    known = {column for _, columns, _ in _CHARTS for column in columns} | _LEFT_OUT
    seen = dict.fromkeys(
        column for run in runs for column in run.curves if column not in known and not column.startswith(_OF_SAVES)
    )
    further = [(column.partition(":")[2].replace("_", " "), (column,), False) for column in seen]
    for chart, columns, log in (*_CHARTS, *further):
        title = _in_mib(chart, [run.curves.get(column, {}) for run in runs for column in columns])
        lines = [
            (
                number + (len(runs) if column.startswith("validation") and len(columns) > 1 else 0),
                name,
                _in_unit(run.curves[column], title),
            )
            for number, run in enumerate(runs)
            for column in columns
            if column in run.curves
            for name in [f"{run.name}: {'validation' if column.startswith('validation') else 'training'}"]
        ]
        picture = plot(lines, label=title, log=log)
        if picture is not None:
            legend = _legend([(colour, name) for colour, name, _ in lines]) if len(columns) > 1 else None
            note = _dim(_MEMORY) if columns == ("metrics:max_memory_bytes",) else None
            yield element("figure", element("h3", title, ", log scale" if log else None), picture, legend, note)


def _in_mib(title: str, curves: Sequence[Series]) -> str:
    """Return the title of a chart of bytes with MiB in place of GiB where all of its values are small."""
    largest = max((value for points in curves for value in points.values()), default=_GIB)
    return title.replace("GiB", "MiB") if largest < _GIB / 10 else title


def _in_unit(points: Series, title: str) -> Series:
    size = {"GiB": _GIB, "MiB": _MIB}.get(title.rpartition(" ")[2], 1)
    return {step: value / size for step, value in points.items()}


def _configuration(runs: Sequence[Run]) -> Iterator[Markup]:
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    differing = [key for key in keys if len({run.values.get(key) for run in runs}) > 1]
    head = ["Key", *(run.name for run in runs), "From"]
    yield element("h2", "Configuration")
    if len(runs) > 1:
        yield from (element("h3", "Differences"), _table(head, _key_rows(runs, differing), differs=True))
    chosen = [key for key in keys if any(_is_set(run, key) for run in runs)]
    for title, shown, opened in (("Keys that are set", chosen, ""), ("All keys", keys, None)):
        summary = element("summary", f"{title} ({len(shown)})")
        yield element("details", summary, _table(head, _key_rows(runs, shown)), open=opened)


def _is_set(run: Run, key: str) -> bool:
    """Return whether a file, the command line or a plugin set the value."""
    return key in run.values and not run.origins.get(key, "").startswith("default")


def _key_rows(runs: Sequence[Run], keys: Sequence[str]) -> list[list[Content]]:
    rows: list[list[Content]] = []
    for key in keys:
        origins = dict.fromkeys(run.origins.get(key, "") for run in runs)
        values = (element("code", run.values[key]) if key in run.values else "-" for run in runs)
        rows.append([element("code", key), *values, ", ".join(filter(None, origins))])
    return rows


def _environment(runs: Sequence[Run]) -> Iterator[Markup]:
    yield element("h2", "Plugins and environment")
    names = list(dict.fromkeys(name for run in runs for name in (*run.facts, *run.versions)))
    rows = [[name, *({**run.versions, **run.facts}.get(name, "-") for run in runs)] for name in names]
    yield (_table(["", *(run.name for run in runs)], rows) if rows else _dim("No checkpoint to read them from."))


def _events(runs: Sequence[Run]) -> Iterator[Markup]:
    yield element("h2", "Events")
    for run in runs:
        rows: list[list[Content]] = [
            [time, element("span", level, class_=level), text] for time, level, text in run.events
        ]
        yield from (element("h3", run.name), _table(["Time", "Level", "What"], rows))


def _samples(runs: Sequence[Run]) -> Iterator[Markup]:
    if any(run.generations for run in runs):
        yield element("h2", "Samples")
    for run in runs:
        for step, prompt, text in run.generations:
            yield from (element("h3", f"{run.name}, step {step}"), element("pre", element("b", prompt), text))


def _table(head: Sequence[str], rows: Sequence[Sequence[Content]], *, differs: bool = False) -> Markup:
    if not rows:
        return _dim("None.")
    lines = [
        element("tr", element("td", cells[0], class_="key"), [element("td", cell) for cell in cells[1:]], class_=mark)
        for cells in rows
        for mark in ["differs" if differs else None]
    ]
    titles = element("tr", [element("th", title) for title in head])
    return element("div", element("table", element("thead", titles), element("tbody", lines)), class_="wide")


def _dim(text: str) -> Markup:
    return element("p", text, class_="dim")
