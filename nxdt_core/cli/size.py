"""Sizes on the command line: ``5GB``, ``512MiB``."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["SIZE"]

_UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip().upper())
        size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
        if size < 1:
            self.fail(f"{value!r} is no size; write it as 5GB, 800MB or 512MiB.", param, ctx)
        return size


SIZE = _Size()
"""A number of bytes, at least 1."""
