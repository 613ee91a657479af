"""Tokens of a text column: in memory, or in a directory that later runs and other processes of the machine share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nxdt_core.data.cache import cached_arrays
from nxdt_core.data.tokens import TokenStream
from nxdt_plugin_hf_data.errors import CacheUnwritable

__all__ = ["cached"]


def cached(directory: Path | None, name: str, make: Callable[[], TokenStream]) -> TokenStream:
    """Return what ``make`` returns, or what it returned when it was called for the same ``name``.

    Raises:
        CacheUnwritable: the directory cannot be written to, or is full.
    """
    if directory is None:
        return make()

    def whole() -> TokenStream:
        made = make()
        return TokenStream(tokens=made.tokens[:], starts=made.starts)

    def unkept(error: OSError) -> None:
        raise CacheUnwritable(path=str(directory), reason=error.strerror or str(error)) from error

    return cached_arrays(directory, name, TokenStream, whole, unkept)
