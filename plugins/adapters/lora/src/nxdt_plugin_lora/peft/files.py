"""Directories that peft reads and writes: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nxdt_core.checkpoint.hf.source import read_json
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.regular_files import replace_text, replacing, require_fetched
from nxdt_plugin_lora.errors import AdapterDiffers, AdapterFileDamaged
from nxdt_plugin_lora.peft.config import MERGE
from nxdt_plugin_lora.peft.names import PeftTensor

__all__ = ["CONFIG", "WEIGHTS", "is_peft", "read_config", "read_peft", "write_peft"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE = "nxdt_base"
"""Key of the file's metadata, which peft leaves alone: digest of the base that the adapter was trained over."""


def is_peft(path: Path) -> bool:
    """Return whether ``path`` is such a directory, by its names alone."""
    return (path / CONFIG).is_file()


def write_peft(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, PeftTensor],
    read: Callable[[Sequence[str]], Iterable[torch.Tensor]],
    *,
    base: str,
) -> int:
    """Write a directory; returns its bytes of weights.

    Args:
        directory: is made.
        config: of :func:`nxdt_plugin_lora.peft.config.peft_config`.
        tensors: of :func:`nxdt_plugin_lora.peft.names.peft_tensors`.
        read: gives the whole parameters of names, in order.
        base: digest of the frozen weights.
    """
    weights = zip(tensors.values(), read([*tensors]), strict=True)
    written = dict(item for tensor, weight in weights for item in tensor.write(weight))
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / WEIGHTS) as file:
        file.write(save(written, metadata={"format": "pt", _BASE: base}))
    replace_text(directory / CONFIG, json.dumps(dict(config), indent=2) + "\n")
    return sum(tensor.nbytes for tensor in written.values())


def read_peft(
    directory: Path, tensors: Mapping[str, PeftTensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the trained parameters by our names, whole and on the host, and the digest of the base weights.

    The digest is empty if peft wrote the file.

    Raises:
        AdapterFileDamaged: a file is missing or broken.
        AdapterDiffers: embedding and head are one matrix here, but two in the file.
        WeightsDoNotFit: the tensors in the file differ from those that ``tensors`` describes.
    """
    path = directory / WEIGHTS
    try:
        require_fetched(path)
        with safe_open(path, framework="pt", device=HOST.type) as file:
            held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterFileDamaged(path=str(path), reason=str(error)) from error
    wanted = {part for tensor in tensors.values() for part in tensor.source.hf_names}
    base_layers = {name for name in held if name.endswith(".base_layer.weight")}  # peft saves them with embeddings
    for each in tensors.values():
        _check_shared(each, held, path)
    wanted |= {each.twin for each in tensors.values() if each.twin is not None}
    missing, extra = sorted(wanted - held.keys()), sorted(held.keys() - wanted - base_layers)
    if missing or extra:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[])
    found = {name: tensor.read(held.__getitem__) for name, tensor in tensors.items()}
    wrong = [
        f"{name}: {tuple(value.shape)} instead of {shapes[name]}"
        for name, value in found.items()
        if tuple(value.shape) != shapes[name]
    ]
    if wrong:
        raise WeightsDoNotFit(missing=[], extra=[], shapes=wrong)
    return found, metadata.get(_BASE, "")


def _check_shared(tensor: PeftTensor, held: Mapping[str, torch.Tensor], path: Path) -> None:
    """A matrix that two modules share trains in both here; peft may have trained it for one of them."""
    if tensor.twin is None:
        return
    names = (*tensor.source.hf_names, tensor.twin)
    found = [held[name] for name in names if name in held]
    if not found:
        return
    if len(found) < len(names) or not all(torch.equal(found[0], other) for other in found):
        said = f"embedding and head share '{tensor.source.name}' here, and it trained them apart"
        raise AdapterDiffers(where=str(path.parent), differences=[said], remedies=(MERGE,))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Raises:
        AdapterFileDamaged: it describes no LoRA.
        HFFileMissing, HFFileDamaged: of the file.
    """
    found = read_json(directory, CONFIG)
    if found.get("peft_type") != "LORA":
        reason = f"its peft_type is {found.get('peft_type')!r}, not 'LORA'"
        raise AdapterFileDamaged(path=str(directory / CONFIG), reason=reason)
    return found
