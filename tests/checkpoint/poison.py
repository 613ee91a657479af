"""Files that run a command when they are unpickled, in every dress in which loaders of tensors meet them."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["DRESSES", "Payload", "dressed", "packed"]


class Payload:
    """Makes a file ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def _saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def packed(archive: bytes) -> bytes:
    """The same archive, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as plain, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    return buffer.getvalue()


class _Legacy(Payload):
    """What ``torch.save`` wrote before version 1.6: pickles one after the other."""

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(Payload(self.marker), buffer, _use_new_zipfile_serialization=False)
        return buffer.getvalue()


DRESSES: Mapping[str, Callable[[Payload], bytes]] = {
    "pickle-0": lambda payload: pickle.dumps(payload, 0),
    "pickle-2": lambda payload: pickle.dumps(payload, 2),
    "pickle-5": lambda payload: pickle.dumps(payload, 5),
    "torch": _saved,
    "torch-beside-tensors": lambda payload: _saved({"model.norm.weight": torch.ones(2), "more": payload}),
    "torch-packed": lambda payload: packed(_saved(payload)),
    "torch-legacy": lambda payload: _Legacy(payload.marker).save(),
}
"""Bytes of a payload, by the name of the format."""


def dressed(dress: str, marker: Path) -> bytes:
    """The bytes of a file in one of the formats."""
    return DRESSES[dress](Payload(marker))
