"""Importing torchao without what it warns of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_warnings"]

_LOGGERS = ("torchao", "torch.utils._pytree")
"""They warn of extensions for other devices, and of torchao's own use of torch's pytrees."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Let an import of torchao within the block log errors alone."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
