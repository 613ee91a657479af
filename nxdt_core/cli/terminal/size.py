"""Sizes on the command line: ``5GB``, ``512MiB``."""

from __future__ import annotations

import re

import click

__all__ = ["size"]

_UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def size(value: str) -> int:
    """Return the number of bytes; the ``type`` of an option."""
    match = _SIZE.fullmatch(value.strip().upper())
    found = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if found < 1:
        raise click.BadParameter(f"{value!r} is not a size; write it as 5GB, 800MB or 512MiB.")
    return found
