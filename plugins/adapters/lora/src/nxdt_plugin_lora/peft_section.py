"""Conversion of a directory of peft to the section ``adapter`` of a run that begins with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nxdt_core.hf.key_map import sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_plugin_lora.errors import AdapterFileDamaged
from nxdt_plugin_lora.peft_files import CONFIG, opened_weights, read_config, section_of
from nxdt_plugin_lora.peft_names import module_of


def section_for(directory: Path, builder: ModelBuilder) -> dict[str, Any]:
    """Return the section: its targets are the modules of ``builder`` that the file has tensors for.

    Raises:
        AdapterFileDamaged: a file is missing or broken, or names a rank that its matrices do not have.
    """
    section = section_of(read_config(directory))
    of_theirs = {theirs: source for source in sources(builder) for theirs in source.hf_names}
    targets, whole = dict[str, None](), dict[str, None]()
    with opened_weights(directory) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            module, updated = module_of(name)
            if not updated and name.endswith(".bias"):  # those of the file's ``bias``, or of a module that is whole
                continue
            source = of_theirs.get(f"{module}.weight")
            ours = f"{module}.weight" if source is None else source.name
            (targets if updated else whole)[ours.removesuffix(".weight")] = None
            if updated and source is not None and ("lora_A" in name or "lora_embedding_A" in name):
                elements, rank = math.prod(file.get_slice(name).get_shape()), section["lora_rank"]
                if type(rank) is int and rank * min(source.shape[-2:]) > elements:
                    reason = f"r is {rank}, and '{name}' has {elements} elements"
                    raise AdapterFileDamaged(path=str(directory / CONFIG), reason=reason)
    return {
        **section,
        "target_modules": [*targets],
        "modules_to_save": [name for name in whole if name not in targets],
        "load_lora_from_ckpt": True,
        "lora_save_dir": str(directory),
    }
