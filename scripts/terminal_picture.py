"""Write the pictures of the README.

    python scripts/terminal_picture.py        docs/images/terminal.svg: three commands with their real output
    python scripts/terminal_picture.py RUN    docs/images/demo-loss.svg: the loss of a run, such as that of `make demo`

The commands run in an empty directory. Long outputs are shortened to the lines that ``SHOWN`` selects. A test compares
the picture with the commands.
"""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxdt_core.cli.report import read_run
from nxdt_core.cli.report_plot import plot

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "terminal.svg"
LOSS = PICTURE.with_name("demo-loss.svg")
SHOWN = {
    "nxdt plan recipe:llama3-70b --world-size 512": slice(0, 4),
    "nxdt data preview recipe:llama-tiny-sft -n 1": slice(1, 6),
    "nxdt train recipe:llama-tiny trainer.max_steps=20": slice(-11, None),
}
"""Command → the lines of its output that are shown."""
_WIDTH, _LINE, _CHARACTER = 104, 19, 8.4
_ENDING = "…"


def main(*runs: str) -> None:
    """Run the commands and write their picture; with a run, write that of its loss."""
    if runs:
        LOSS.write_text(loss_svg(Path(runs[0])))
        return
    lines: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        for command, part in SHOWN.items():
            lines += [
                ("command", f"$ {command}"),
                *(("output", line) for line in shown(command, part, Path(directory))),
            ]
            lines.append(("output", ""))
    PICTURE.write_text(svg(lines[:-1]))


def shown(command: str, part: slice, directory: Path, run: Callable[..., Any] = subprocess.run) -> list[str]:
    """Return the selected lines of a command's output, cut to the width of the picture; ``run`` starts it."""
    words = [sys.executable, "-m", "nxdt_core", *shlex.split(command)[1:]]
    done = run(words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    text = done.stdout.replace(f"{directory}/", "")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + _ENDING for line in lines[part]]


_CURVES = """
rect{fill:#fff}text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#57606a}.grid{stroke:#d8dee4}
polyline{fill:none;stroke-width:2}.s0{stroke:#0969da;fill:#0969da}.s1{stroke:#bc4c00;fill:#bc4c00}
@media (prefers-color-scheme:dark){rect{fill:#0d1117}text{fill:#9198a1}.grid{stroke:#30363d}
.s0{stroke:#58a6ff;fill:#58a6ff}.s1{stroke:#f0883e;fill:#f0883e}}text.s0,text.s1{stroke:none}
"""


def loss_svg(directory: Path) -> str:
    """Return the losses of training and validation of a run over its steps, readable on light and dark pages."""
    curves = read_run(directory).curves
    names = {"metrics:loss": "training loss", "validation:loss": "validation loss"}
    lines = [(number, name, curves[column]) for number, (column, name) in enumerate(names.items())]
    drawn = plot(lines, label=" and ".join(names.values()))
    assert drawn is not None
    legend = "".join(
        f'<text class="s{number}" x="396" y="{28 + 16 * number}" text-anchor="end">{name}</text>'
        for number, name, _ in lines
    )
    ground = f'<style>{_CURVES}</style><rect width="420" height="230" rx="8"/>{legend}'
    opening, rest = drawn.html.removeprefix("<svg").split(">", 1)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="560"{opening}>{ground}{rest}\n'


def svg(lines: list[tuple[str, str]]) -> str:
    """Return a terminal window with these lines, each a style and a text."""
    width, height = round(_WIDTH * _CHARACTER) + 32, len(lines) * _LINE + 60
    rows = [
        f'<text x="16" y="{56 + number * _LINE}" class="{style}">{html.escape(text)}</text>'
        for number, (style, text) in enumerate(lines)
        if text
    ]
    dots = [
        f'<circle cx="{20 + 20 * i}" cy="18" r="6" fill="{c}"/>'
        for i, c in enumerate(("#e06c75", "#e5c07b", "#98c379"))
    ]
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        ".command{fill:#7fd1b9;font-weight:bold}.output{fill:#d7dae0}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>A terminal session: nxdt plan, nxdt data preview, nxdt train</title>",
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#21252b"/>',
            *dots,
            *rows,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
