"""From a directory of peft to the section ``adapter`` of a run that begins with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nxdt_core.checkpoint.hf.key_map import sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_plugin_lora.errors import AdapterFileDamaged
from nxdt_plugin_lora.peft_files import WEIGHTS, read_config, section_of
from nxdt_plugin_lora.peft_names import module_of


def section_for(directory: Path, builder: ModelBuilder) -> dict[str, Any]:
    """Return the section: its targets are the modules of ``builder`` that the file has tensors for.

    Raises:
        AdapterFileDamaged: a file is missing or broken.
    """
    of_theirs = {theirs: source.name for source in sources(builder) for theirs in source.hf_names}
    of_theirs = {**{user: user for _, user in builder.plan().tied}, **of_theirs}
    targets, whole = dict[str, None](), dict[str, None]()
    for name in _names(directory / WEIGHTS):
        module, updated = module_of(name)
        if not updated and name.endswith(".bias"):  # those of the file's ``bias``, or of a module that is whole
            continue
        ours = of_theirs.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")
        (targets if updated else whole)[ours] = None
    section = section_of(read_config(directory))
    return {
        **section,
        "target_modules": [*targets],
        "modules_to_save": [name for name in whole if name not in targets],
        "load_lora_from_ckpt": True,
        "lora_save_dir": str(directory),
    }


def _names(path: Path) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as file:
            yield from file.keys()
    except (SafetensorError, OSError) as error:
        raise AdapterFileDamaged(path=str(path), reason=str(error)) from error
