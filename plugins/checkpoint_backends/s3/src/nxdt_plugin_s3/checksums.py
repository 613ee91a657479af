"""The checksum that goes with each part and that the server compares before it takes the part."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

__all__ = ["Checksum", "choose"]

_BYTES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}


@dataclass(frozen=True, slots=True)
class Checksum:
    """One algorithm; all of them give the GIL up, or take half a millisecond for 16 MiB."""

    algorithm: str
    """As S3 calls it: ``CRC32C``."""
    compute: Callable[[bytes | memoryview], int]
    size_bytes: int

    def arguments(self, data: bytes | memoryview) -> dict[str, str]:
        """Return what a request that carries ``data`` says of it."""
        digest = self.compute(data).to_bytes(self.size_bytes, "big")
        return {f"Checksum{self.algorithm}": base64.b64encode(digest).decode()}


def choose(name: str) -> Checksum:
    """Return the algorithm of ``checkpoint.storage.checksum``.

    Raises:
        ModuleNotFoundError: it needs awscrt, which is not installed.
    """
    if name == "crc32":
        return Checksum("CRC32", zlib.crc32, _BYTES[name])
    try:
        crt = import_module("awscrt.checksums")
    except ModuleNotFoundError:
        if name == "auto":
            return choose("crc32")
        raise
    known = "crc32c" if name == "auto" else name
    return Checksum(known.upper(), getattr(crt, known), _BYTES[known])
