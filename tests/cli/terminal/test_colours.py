"""Colours of the output are readable on light and dark backgrounds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [*ROOT.glob("nxdt_core/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]

PALETTES = {
    "VS Code, dark": ("1e1e1e", {"red": "cd3131", "green": "0dbc79", "yellow": "e5e510", "magenta": "bc3fbc"}),
    "VS Code, light": ("ffffff", {"red": "cd3131", "green": "107c10", "yellow": "949800", "magenta": "bc05bc"}),
    "GNOME, dark": ("171421", {"red": "c01c28", "green": "26a269", "yellow": "a2734c", "magenta": "a347ba"}),
    "GNOME, light": ("ffffff", {"red": "c01c28", "green": "26a269", "yellow": "a2734c", "magenta": "a347ba"}),
    "Solarized, dark": ("002b36", {"red": "dc322f", "green": "859900", "yellow": "b58900", "magenta": "d33682"}),
    "Solarized, light": ("fdf6e3", {"red": "dc322f", "green": "859900", "yellow": "b58900", "magenta": "d33682"}),
}
"""Background, and the colours that nxdt uses, as the themes define them."""


def used():
    """Colours by name, and the calls in which a colour is bold: many terminals show it as the bright one."""
    calls = [
        call for path in SOURCES for call in re.findall(r"(?:style|secho)\((?:[^()]|\([^()]*\))*\)", path.read_text())
    ]
    names = {name for call in calls for name in re.findall(r"""fg=['"](\w+)""", call)}
    tables = (ROOT / "nxdt_core/cli/terminal.py").read_text().partition("_SHADES = {")[2].partition("}")[0]
    names |= {name for path in SOURCES for name in re.findall(r'"fg": "(\w+)"', path.read_text())}
    return names | set(re.findall(r': "(\w+)"', tables)), [
        each for each in calls if "bold=True" in each and "fg=" in each
    ]


def luminance(colour):
    """Relative luminance of WCAG 2."""
    shares = [int(colour[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    red, green, blue = (share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_only_colours_of_every_palette_are_used():
    names, bold = used()
    assert {"red", "green", "yellow"} <= names
    assert names <= PALETTES["GNOME, dark"][1].keys()
    assert [call for call in bold if "red" not in call] == [], "bold green and yellow become bright ones"


@pytest.mark.parametrize("theme", PALETTES)
def test_the_colours_stand_out_from_the_background(theme):
    background, colours = PALETTES[theme]
    found = {name: contrast(background, colours[name]) for name in used()[0]}
    assert {name: ratio for name, ratio in found.items() if ratio < 2.9} == {}
