"""The files that transformers loads a tokenizer from, as an exported model carries them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nxdt_core.data.tokenizers.huggingface_chat import FOR_TOOLS, chat_template
from nxdt_core.data.tokenizers.huggingface_sources import FILE, Loaded, read_record

__all__ = ["pretrained_files"]

_BESIDE = ("chat_template.jinja", "chat_template.json", "tokenizer.model")
"""Files that are copied unchanged where they are next to the tokenizer."""
_CONFIG = "tokenizer_config.json"


def pretrained_files(loaded: Loaded, special_tokens: Mapping[str, str | None]) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and what belongs to them.

    Args:
        loaded: the tokenizer and where it comes from.
        special_tokens: ``bos_token``, ``eos_token``, ``pad_token`` → the token in use, or None.
    """
    record: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files: dict[str, bytes] = {}
    if loaded.directory is not None:
        record |= read_record(loaded.directory)
        present = [name for name in _BESIDE if (loaded.directory / name).is_file()]
        files |= {name: (loaded.directory / name).read_bytes() for name in present}
        if (loaded.directory / FOR_TOOLS).is_file() and (template := chat_template(loaded)) is not None:
            files["chat_template.jinja"] = template.encode()
    own = loaded.content if loaded.is_json else loaded.tokenizer.to_str().encode()
    return {**files, FILE: own, _CONFIG: (json.dumps({**record, **special_tokens}, indent=2) + "\n").encode()}
