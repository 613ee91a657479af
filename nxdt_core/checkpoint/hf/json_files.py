"""JSON files of Hugging Face directories, read and written. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxdt_core.config.huggingface import spell_floats
from nxdt_core.errors.models import HFFileDamaged, HFFileMissing
from nxdt_core.regular_files import read_text

__all__ = ["CONFIG", "GENERATION_CONFIG", "json_bytes", "read_json", "read_optional_json"]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def read_json(directory: Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory.

    Raises:
        HFFileMissing: the file does not exist.
        HFFileDamaged: it does not hold a JSON object.
    """
    path = directory / file
    try:
        content = json.loads(read_text(path, follow=True))
    except FileNotFoundError as error:
        raise HFFileMissing(directory=str(directory), wanted=f"'{file}'") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HFFileDamaged(path=str(path), reason=getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(content, dict):
        raise HFFileDamaged(path=str(path), reason="it does not hold a JSON object")
    return content


def read_optional_json(directory: Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory; empty if the file does not exist.

    Raises:
        HFFileDamaged: it does not hold a JSON object.
    """
    return read_json(directory, file) if (directory / file).exists() else {}


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file. JSON has no infinities: they are written as transformers 5 spells them."""
    return (json.dumps(spell_floats(content), indent=2, allow_nan=False) + "\n").encode()
