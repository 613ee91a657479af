"""``nxdt report`` writes a page about runs, ``nxdt watch`` serves it on this machine while they grow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from nxdt_core.cli.report.page import POLICY, notice, page
from nxdt_core.cli.report.records import read_run
from nxdt_core.cli.verb import Verb, say
from nxdt_core.errors.training import NotARunDirectory
from nxdt_core.http_server import Handler, Server

__all__ = ["report", "watch"]

_HOST = "127.0.0.1"
_REFRESH_S = 10

_runs = click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.command(
    cls=Verb,
    short_help="Write an HTML report with the metrics and configuration of runs.",
    examples=("nxdt report nxdt_experiments/llama-tiny", "nxdt report runs/a runs/b -o compare.html"),
)
@_runs
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="By default RUN_DIR/report.html.")
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML page about runs: curves, configuration with origins and differences, plugins, events, samples.

    The page has everything inside and opens from disk. Of several runs, the curves share each plot.
    """
    from nxdt_core.errors.training import CannotWriteReport
    from nxdt_core.regular_files import regular_opener

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
    short_help="Serve the report of runs while they train.",
    examples=("nxdt watch nxdt_experiments/llama-tiny", "nxdt watch runs/a runs/b --port 9000"),
)
@_runs
@click.option("--port", type=click.IntRange(0, 65535), default=8077, help="Of 127.0.0.1 (8077); 0 takes a free one.")
def watch(runs: tuple[Path, ...], port: int) -> None:
    """Serve the page of `nxdt report` on 127.0.0.1, read again at each request; Ctrl-C ends it.

    A browser loads it again every 10 seconds. Other machines cannot reach it: use ssh -L for a remote run.
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
