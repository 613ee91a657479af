"""What a LoRA run writes beside its checkpoints, where its section asks for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nxdt_core import checkpoint
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.merging import merge_lora
from nxdt_plugin_lora.peft_config import peft_config
from nxdt_plugin_lora.peft_files import CONFIG

__all__ = ["MERGED", "merge_last", "write_options"]

MERGED = "-merged"
"""Behind the address of a run's checkpoints: where the merged model is committed."""
_DIRECTORY = "lora_adapter"

_log = logging.getLogger(__name__)


def write_options(section: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``lora_adapter/adapter_config.json``: the section in peft's words, targets as they are named here."""
    known = {item.name for item in fields(LoraConfig)}
    lora = LoraConfig(**{key: value for key, value in section.items() if key in known})
    content = peft_config(
        lora, base=None, targets=lora.target_modules, whole=lora.modules_to_save, modules=(), transposed=False
    )
    directory = run_dir / _DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def merge_last(uri: str) -> None:
    """Merge the checkpoint at ``uri``, if it is the last of a run with ``merge_lora``."""
    storage, step = checkpoint.locate(uri)
    assert step is not None
    config = checkpoint.read_manifest(storage, step).facts.config
    section = config.get("adapter", {})
    if section.get("name") == "lora" and section.get("merge_lora") and step == config["trainer"]["max_steps"]:
        merged = merge_lora(uri, f"{storage.uri}{MERGED}")
        _log.warning("merged model: %s", merged.target)
