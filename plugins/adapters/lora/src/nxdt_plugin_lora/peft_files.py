"""Directories of peft: ``adapter_config.json`` and the weights, read and written."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nxdt_core.checkpoint.format.hf_source import read_json
from nxdt_core.config.huggingface import unusable
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.system.regular_files import replace_text, replacing, require_fetched, require_inside
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import AdapterDiffers, AdapterFileDamaged
from nxdt_plugin_lora.peft_names import PeftTensor

_SAME = {"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Theirs → ours: what decides on the values of the update."""
_THEIR_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
_UNREAD = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Features of peft that change what is computed or trained and are not implemented."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is; most others take the start out of it."""
MERGE = "Merge it into the model with peft (merge_and_unload), and start from that model."
"""Advice if no section here describes what a file has."""
_CONVERT = (
    "Convert it with peft (save_pretrained(..., path_initial_model_for_weight_conversion=DIR), where DIR is the "
    "adapter as it was before training), or merge it there (merge_and_unload) and start from that model."
)
_LAYERS = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")
"""Ends of the names of layer weights, for adapters of ours that are target parameters in peft."""
_CONVERTED = ("pissa", "corda", "olora", "lora_ga")
"""Beginnings of values of ``init_lora_weights`` that peft converts."""


def peft_config(
    config: LoraConfig,
    *,
    base: str | None,
    targets: Iterable[str],
    whole: Iterable[str],
    modules: Iterable[str],
    transposed: bool,
    tied: bool = False,
    matrices: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the file's content.

    Args:
        config: the resolved configuration of the run.
        base: name or path of the base model.
        targets: modules of transformers with an update.
        whole: modules that train whole.
        modules: all that could have an update.
        transposed: whether the base's matrices are stored as [in, out].
        tied: whether embedding and head train whole as one matrix.
        matrices: weights with an update that are targets by their own names.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{theirs: getattr(config, ours) for theirs, ours in _SAME.items()},
        "lora_dropout": config.lora_dropout,
        "bias": config.biases,
        "target_modules": shortened(targets, modules),
        "target_parameters": sorted(matrices) or None,
        "modules_to_save": sorted(whole) or None,
        "ensure_weight_tying": tied,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def section_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of the section ``adapter``; its targets are named as in transformers and left out."""
    return {
        "name": "lora",
        **{ours: theirs.get(name, _THEIR_DEFAULTS[name]) for name, ours in _SAME.items()},
        "lora_dropout": theirs.get("lora_dropout", 0.0),
        "lora_bias": theirs.get("bias", "none"),
    }


def shortened(targets: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the last words of ``targets``, where all modules that end so are among them; else whole paths."""
    chosen, by_leaf = set(targets), defaultdict(set)
    for module in {*modules, *chosen}:
        by_leaf[module.rpartition(".")[2]].add(module)
    short = {leaf for leaf, found in by_leaf.items() if found <= chosen and not leaf.isdigit()}
    return sorted(short | {module for module in chosen if module.rpartition(".")[2] not in short})


def differences(config: LoraConfig, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a file's adapter computes something else than ``config`` describes."""
    for name, ours in _SAME.items():
        found = theirs.get(name, _THEIR_DEFAULTS[name])
        if found != getattr(config, ours):
            yield f"{ours} is {found} there and {getattr(config, ours)} here"


def unsupported_options(theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a file's adapter has that no section here describes, and what to do about each."""
    start = theirs.get("init_lora_weights", True)
    if start not in _STARTS:
        remedy = _CONVERT if str(start).lower().startswith(_CONVERTED) else MERGE
        yield f"init_lora_weights is {start!r}, which is more than a start", remedy
    for name in _UNREAD:
        if theirs.get(name) and not (name == "target_parameters" and _of_layers(theirs[name])):
            yield f"it uses {name}, which is not implemented", MERGE


def _of_layers(parameters: Iterable[str]) -> bool:
    """Return whether they are weights of layers, whose updates are the same under either way to name them."""
    return all(name.endswith(_LAYERS) for name in parameters)


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
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Write a directory; returns its bytes of weights.

    Args:
        directory: is made.
        config: of :func:`nxdt_plugin_lora.peft_files.peft_config`.
        tensors: of :func:`nxdt_plugin_lora.peft_names.peft_tensors`.
        read: gives the whole parameters of names, in order.
        base: digest of the frozen weights.
        files: further ones by name, such as the tokenizer's.
    """
    weights = zip(tensors.values(), read([*tensors]), strict=True)
    written = dict(item for tensor, weight in weights for item in tensor.write(weight))
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / WEIGHTS) as file:
        file.write(save(written, metadata={"format": "pt", _BASE: base}))
    for name, content in (files or {}).items():
        with replacing(directory / name) as file:
            file.write(content)
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
    with opened_weights(directory) as file:
        held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
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


@contextmanager
def opened_weights(directory: Path) -> Iterator[Any]:
    """Open the weights of a directory.

    Raises:
        AdapterFileDamaged: they are missing or broken, not a regular file, or a link out of the directory.
    """
    path = directory / WEIGHTS
    try:
        require_inside(path, directory)
        require_fetched(path)
        with safe_open(path, framework="pt", device=HOST.type) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AdapterFileDamaged(path=str(path), reason=str(error)) from error


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
        AdapterFileDamaged: it describes no LoRA, or has a value that no such file has.
        HFFileMissing, HFFileDamaged: of the file.
    """
    found = read_json(directory, CONFIG)
    reason = unusable(found, weights=None)
    base, matrices = found.get("base_model_name_or_path"), found.get("target_parameters") or []
    if found.get("peft_type") != "LORA":
        reason = f"its peft_type is {found.get('peft_type')!r}, not 'LORA'"
    elif not isinstance(base, str | None):
        reason = f"base_model_name_or_path is {base!r}, not a path or a name"
    elif not isinstance(matrices, list) or not all(isinstance(name, str) for name in matrices):
        reason = f"target_parameters is {matrices!r}, not a list of names"
    if reason is not None:
        raise AdapterFileDamaged(path=str(directory / CONFIG), reason=reason)
    return found
