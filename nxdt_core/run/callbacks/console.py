"""Console output of a training run: a line per logged step, and a bar below them on a terminal."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping
from typing import Any, TextIO

import click
from tqdm import tqdm

from nxdt_core.run.log import VALUES
from nxdt_core.system.visible_text import colours_wanted, from_here, visible

_log = logging.getLogger(__name__)
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
