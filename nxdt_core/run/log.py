"""What a training run says: lines and a progress bar on the console, and log records as text or as one JSON object per
line, for programs that collect logs.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, TextIO, cast

import click
from tqdm import tqdm

from nxdt_core.config import ResolvedConfig
from nxdt_core.config.show import hide_secrets, hide_secrets_in
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.engine import RankInfo
from nxdt_core.system.regular_files import make_directory, regular_opener
from nxdt_core.system.visible_text import VisibleFormatter, colours_wanted, from_here, visible
from nxdt_core.train.build import run_dir_explained

_OURS = logging.getLogger("nxdt_core")
_log = logging.getLogger(__name__)
_FORM = "%(asctime)s %(levelname)s rank %(rank)d %(name)s: %(message)s"
VALUES = "nxdt_values"
"""Attribute of a record: the values that its message shows, such as a row of ``metrics.jsonl``."""
_CODE = re.compile(r"\[(NXDT-[A-Z0-9]+)\]")
_BAR = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}, ETA {remaining}{postfix}"
"""Format of the progress bar; at 80 columns the bar itself has 15 of them."""
_TICK_S = 1.0
_NO_END = "step {n_fmt}, {elapsed}{postfix}"
_STYLES: Mapping[str, Mapping[str, Any]] = {
    r"step \d+: validation": {"fg": "magenta"},
    r"step \d+: checkpoint saved": {"fg": "green"},
    r"note:|step \d+: no checkpoint|.*\bstopping\b": {"fg": "yellow"},
    r"step [\d/]+|[a-z]+(?=  )|checkpoints(?= )": {"bold": True},
}
"""Pattern → style of the beginning of a line that it matches; the first pattern counts."""


class Console:
    """Prints to standard error; silent on all ranks but one.

    Args:
        max_steps: end of the run, −1 for none.
        speaks: whether this rank prints at all.
        bar: whether to draw a bar; None: on a terminal.
        stream: standard error where None.
        prints: whether it prints; without it, lines go to the log alone, which may print them.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        speaks: bool = True,
        bar: bool | None = None,
        stream: TextIO | None = None,
        prints: bool = True,
    ) -> None:
        self.max_steps = max_steps
        """End of the run; -1 for none."""
        self._stream = stream or sys.stderr
        self._draws = prints and (self._stream.isatty() if bar is None else bar)
        wanted = colours_wanted()
        self._coloured = self._stream.isatty() if wanted is None else wanted
        self._prints = prints
        self._speaks = speaks
        self._bar: Any = None
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()

    def say(self, line: str, row: Mapping[str, Any] | None = None) -> None:
        """Print a line above the bar; ``row`` has its values for logs that keep them."""
        if not self._speaks:
            return
        _log.info(line, extra={VALUES: row})
        if not self._prints:
            return
        with tqdm.get_lock():  # the thread that ticks waits
            if self._bar is not None:
                self._bar.clear()
            text = visible(line)
            if self._stream.isatty():  # words stay whole: a path can be copied
                wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent="  ")
                wrapper.break_long_words = wrapper.break_on_hyphens = False
                text = wrapper.fill(from_here(text))
            for pattern, style in _STYLES.items() if self._coloured else ():
                if start := re.match(pattern, text):
                    text = click.style(start[0], **style) + text[start.end() :]
                    break
            print(text, file=self._stream, flush=True)
            if self._bar is not None:
                self._bar.refresh()

    def begin(self, step: int) -> None:
        """Draw the bar of a run that trains from ``step``, where one is drawn; its clock ticks during long steps."""
        if not (self._speaks and self._draws) or self._bar is not None:
            return
        self._bar = tqdm(
            total=self.max_steps if self.max_steps > 0 else None,
            initial=step,
            file=self._stream,
            mininterval=0.1,  # a redraw takes 0.3 ms of a core
            miniters=1,
            dynamic_ncols=True,
            bar_format=_BAR if self.max_steps > 0 else _NO_END,
            colour="green" if self._coloured else None,
        )

        def tick() -> None:
            while not self._closed.wait(_TICK_S):
                self._bar.refresh()

        self._ticker = threading.Thread(target=tick, name="progress bar", daemon=True)
        self._ticker.start()

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics: a line, which stays, and the bar below it."""
        self.begin(row["step"])
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {row['loss']:.4f}, {human(row['tokens_per_s'])} tokens/s", refresh=False)
            self.advance(row["step"])
        done = f"step {row['step']}"
        if self.max_steps > 0:  # as wide as the last one, so that the values are columns
            done = f"{done}/{self.max_steps}".ljust(len(f"step {self.max_steps}/{self.max_steps}"))
        # The mean reward, of which an objective that draws answers makes a loss near zero.
        reward = "" if row.get("reward") is None else f"  reward {row['reward']:.4f}"
        values = f"loss {row['loss']:.4f}{reward}  grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}"
        mfu = "" if row["mfu"] is None else f"  mfu {100 * row['mfu']:.1f} %"
        self.say(f"{done}  {values}  {human(row['tokens_per_s'])} tokens/s{mfu}", row)

    def validation(self, row: Mapping[str, Any], unit: str = "tokens") -> None:
        """Show the loss of a validation, and that of each set where there are several."""
        self.say(f"step {row['step']}: validation {_validation_text(row, unit)}", row)
        for name, metrics in row.get("sets", {}).items():
            self.say(f"  {name}: {_validation_text(metrics, unit)}")

    def close(self) -> None:
        """Close the bar and leave its last state on the screen."""
        if self._ticker is not None:
            self._closed.set()
            self._ticker.join()
            self._bar.close()
            self._bar = self._ticker = None


def _validation_text(metrics: Mapping[str, Any], unit: str) -> str:
    loss = "none" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    perplexity = f", perplexity {metrics['perplexity']:.4g}" if metrics.get("perplexity") else ""
    reward = "" if metrics.get("reward") is None else f", reward {metrics['reward']:.4f}"
    return f"loss {loss}{reward}{perplexity} over {metrics[unit]:,} {unit}"


def human(number: float) -> str:
    """Return a count in three digits: ``12.3k``."""
    for bound, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= bound:
            return f"{number / bound:.3g}{suffix}"
    return f"{number:.3g}"


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object, on one line.

    Args:
        rank: global rank of this process.
        redact: replaces what must not be written, in the message and in a traceback.
    """

    def __init__(self, *, rank: int, redact: Callable[[str], str] = str) -> None:
        super().__init__()
        self._rank = rank
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of the record."""
        message = self._redact(record.getMessage())
        code = _CODE.match(message)
        trace = self.formatException(record.exc_info) if record.exc_info else None
        time = datetime.fromtimestamp(record.created, UTC)
        document = {
            "time": f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03}Z",
            "level": record.levelname,
            "rank": self._rank,
            "logger": record.name,
            "message": message,
            "code": None if code is None else code[1],
            "data": getattr(record, VALUES, None),
            "trace": None if trace is None else self._redact(trace),
        }
        return visible(strict_json(document))


def strict_json(value: Any) -> str:
    """Return ``value`` as JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), ensure_ascii=False)


class _File(logging.FileHandler):
    """A log that cannot be written does not disturb what it reports: one line on standard error says so, and the file
    gets no more."""

    quiet = False
    """True if standard error gets the same lines, so that a lost line need not be reported."""
    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; the first one opens the file."""
        if self._failed:
            return
        try:
            super().emit(record)
        except OSError as error:  # of opening it
            self._fail(error)

    def _open(self) -> TextIOWrapper:
        """Open the file as a regular one: a link or a pipe may be in its place."""
        file = open(self.baseFilename, self.mode, encoding=self.encoding, opener=regular_opener)  # noqa: SIM115
        return cast(TextIOWrapper, file)

    def handleError(self, record: logging.LogRecord) -> None:
        """Note what kept a line from being written."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._fail(error)

    def close(self) -> None:
        """Close the file, even if a line that is still in memory cannot be written."""
        with suppress(OSError):
            super().close()

    def _fail(self, error: OSError) -> None:
        self._failed = True
        reason = error.strerror or str(error)
        if not self.quiet:
            print(visible(f"The log {self.baseFilename} is incomplete: {reason}"), file=sys.stderr, flush=True)


@contextmanager
def printed(config: ResolvedConfig, info: RankInfo) -> Iterator[None]:
    """Print warnings and errors of a block on standard error; with JSON lines, also what the console says, and what
    ended the block.

    Values from the environment and secrets are replaced in the error that ends the block.
    """
    as_json = config.run.exp_manager.log_format == "json"
    printing: list[logging.Handler] = []
    if as_json:  # everything of rank 0, and errors of each rank
        printing = [logging.StreamHandler()]
        printing[0].setLevel(logging.NOTSET if info.rank == 0 else logging.ERROR)
        printing[0].setFormatter(JsonFormatter(rank=info.rank, redact=hide_secrets))
    elif logging.lastResort is not None and not logging.getLogger().handlers:
        # What Python prints where no handler is set: warnings of rank 0 alone, since most often all ranks find them,
        # and errors of each rank.
        printing = [logging.lastResort if info.rank == 0 else logging.StreamHandler()]
        if info.rank != 0:
            printing[0].setLevel(logging.ERROR)
            printing[0].setFormatter(VisibleFormatter(redact=hide_secrets))
    root, level = logging.getLogger(), _OURS.level
    _OURS.setLevel(logging.INFO)
    for handler in printing:
        root.addHandler(handler)

    def log_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        logging.getLogger("py.warnings").warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)

    try:
        with warnings.catch_warnings() if as_json else nullcontext():
            if as_json:  # what Python would print as text
                warnings.showwarning = log_warning
            yield
    except Exception as error:
        hide_secrets_in(error)
        for handler in printing if as_json else ():
            handler.handle(_failure(error))
        raise
    finally:
        _OURS.setLevel(level)
        for handler in printing:
            root.removeHandler(handler)


@contextmanager
def run_log(config: ResolvedConfig, info: RankInfo) -> Iterator[None]:
    """Keep this rank's log during a block, below ``logs`` of the run's directory, which the run owns.

    Values from the environment and secrets are replaced in it, and in the error that ends the block.

    Every rank's errors also go to ``errors.txt`` (or ``errors.jsonl``) there, which a run without any does not have.

    Raises:
        CannotWriteRunDirectory: the logs' directory cannot be made.
    """
    directory, as_json = config.run_dir / "logs", config.run.exp_manager.log_format == "json"
    suffix = "jsonl" if as_json else "txt"
    with run_dir_explained(config):
        make_directory(directory)
    errors = _File(directory / f"errors.{suffix}", delay=True, encoding="utf-8")
    errors.setLevel(logging.ERROR)
    files = [errors]
    manager, first = config.run.exp_manager, info.local_rank == 0
    if info.rank == 0 if manager.log_global_rank_0_only else first or not manager.log_local_rank_0_only:
        name = f"globalrank-{info.rank}_localrank-{info.local_rank}.{suffix}"
        files.append(_File(directory / name, delay=True, encoding="utf-8"))
    text = VisibleFormatter(_FORM, defaults={"rank": info.rank}, redact=hide_secrets)
    root = logging.getLogger()
    for file in files:
        file.setFormatter(JsonFormatter(rank=info.rank, redact=hide_secrets) if as_json else text)
        root.addHandler(file)
    try:
        yield
    except Exception as error:
        hide_secrets_in(error)
        for file in files:
            file.quiet = True
            file.handle(_failure(error))
        raise
    finally:
        for file in files:
            root.removeHandler(file)
            file.close()


def _failure(error: Exception) -> logging.LogRecord:
    """Return the record of what ended a run; the command line prints its text."""
    trace = None if isinstance(error, NxdtError) else (type(error), error, error.__traceback__)
    return _OURS.makeRecord(_OURS.name, logging.ERROR, __file__, 0, str(error), (), trace)
