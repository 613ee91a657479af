"""Hugging Face directories: ``config.json`` beside safetensors weights, read and written through a builder's key map.

Tensors are read one at a time out of mapped files; nothing is ever unpickled. What the names mean is the builder's
business (:class:`~nxdt_core.protocols.model.HFExchange`), not this module's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nxdt_core.checkpoint.hf_keys import Source, sources
from nxdt_core.devices import HOST
from nxdt_core.errors import HFExchangeUnsupported, HFFileDamaged, HFFileMissing, HFNotWritable, WeightsDoNotFit
from nxdt_core.nn.patterns import matches_any
from nxdt_core.protocols.model import HFExchange, ModelBuilder
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["iterate_hf", "load_hf", "read_hf_config", "save_hf"]

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""Size of a weights file beyond which another is begun, as in transformers."""


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The ``config.json`` of ``directory``.

    Raises:
        HFFileMissing: there is none.
        HFFileDamaged: it is no JSON object.
    """
    return _read_json(Path(directory), _CONFIG)


def load_hf(directory: str | Path, builder: ModelBuilder) -> dict[str, torch.Tensor]:
    """All parameters by global name, on the CPU, in the dtype of the files; a tied one once, under its owner's name.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFFileMissing: the directory or its weights are not there.
        HFFileDamaged: a file is truncated or no safetensors file.
        WeightsDoNotFit: names or shapes are not those of the builder's model.
    """
    return dict(iterate_hf(directory, builder))


def iterate_hf(directory: str | Path, builder: ModelBuilder) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`load_hf`, one parameter in memory at a time; names are checked before the first is read."""
    directory = Path(directory)
    exchange, shapes = _exchange(builder), _shapes(builder)
    wanted = sources(type(builder).__name__, exchange.hf_key_map(), shapes)
    with ExitStack() as stack:
        located = _locate(directory, stack)
        _check_names(wanted, located, exchange.hf_ignored)
        for source in wanted:
            tensor = source.read(lambda name: _get_tensor(located, name))
            if tensor.shape != shapes[source.name]:
                found, own = tuple(tensor.shape), tuple(shapes[source.name])
                raise WeightsDoNotFit(missing=[], extra=[], shapes=[f"{source.name}: {found} instead of {own}"])
            yield source.name, tensor


def save_hf(
    directory: str | Path,
    builder: ModelBuilder,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the weights so that ``AutoModelForCausalLM.from_pretrained`` loads them.

    Args:
        directory: is created; must be empty if it exists.
        builder: gives configuration and names.
        state_dict: all parameters by global name, whole; copies of tied ones are left out.
        tokenizer: its special ids go into ``config.json``; without one they are null there.
        max_shard_bytes: of one weights file; a larger tensor has a file of its own.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFNotWritable: the directory holds something already.
        WeightsDoNotFit: ``state_dict`` is not that of the builder's model.
    """
    directory = Path(directory)
    exchange, shapes = _exchange(builder), _shapes(builder)
    wanted = sources(type(builder).__name__, exchange.hf_key_map(), shapes)
    _check_state(state_dict, shapes, {user for _, user in builder.plan().tied})
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HFNotWritable(directory=str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value for source in wanted for name, value in source.write(state_dict[source.name]).items()}
    _write_weights(directory, tensors, max_shard_bytes)
    config = dict(exchange.config_to_hf())
    config["torch_dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    for key in ("bos", "eos", "pad"):
        config[f"{key}_token_id"] = getattr(tokenizer, f"{key}_id", None)
    _write_json(directory / _CONFIG, config)  # last: an interrupted export is no readable directory


def _exchange(builder: ModelBuilder) -> HFExchange:
    if not isinstance(builder, HFExchange):
        raise HFExchangeUnsupported(builder=type(builder).__name__)
    return builder


def _shapes(builder: ModelBuilder) -> dict[str, torch.Size]:
    """Shapes of all parameters by global name; a tied one once."""
    with torch.device("meta"):
        module = builder.build()
    users = {user for _, user in builder.plan().tied}
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.shape for name, parameter in named if name not in users}


def _locate(directory: Path, stack: ExitStack) -> dict[str, tuple[Path, Any]]:
    """Where each tensor of the directory lies: its file and that file, opened."""
    if (directory / _INDEX).is_file():
        index = _read_json(directory, _INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise HFFileDamaged(path=str(directory / _INDEX), reason="it has no 'weight_map' of names to files")
        files = sorted(set(index.values()))
    else:
        files = [_WEIGHTS]
    located: dict[str, tuple[Path, Any]] = {}
    for file in files:
        path = directory / Path(file).name  # an index names files beside it, never elsewhere
        if not path.is_file():
            raise HFFileMissing(directory=str(directory), wanted=f"'{path.name}'")
        try:
            handle = stack.enter_context(safe_open(path, framework="pt", device=HOST.type))
        except (SafetensorError, OSError) as error:
            raise HFFileDamaged(path=str(path), reason=str(error)) from error
        located |= dict.fromkeys(handle.keys(), (path, handle))
    return located


def _get_tensor(located: Mapping[str, tuple[Path, Any]], name: str) -> torch.Tensor:
    path, handle = located[name]
    try:
        tensor: torch.Tensor = handle.get_tensor(name)
    except SafetensorError as error:
        raise HFFileDamaged(path=str(path), reason=str(error)) from error
    return tensor


def _check_names(wanted: list[Source], present: Mapping[str, Any], ignored: tuple[str, ...]) -> None:
    names = {name for source in wanted for name in source.hf_names}
    missing = sorted(names - present.keys())
    extra = sorted(name for name in present.keys() - names if not matches_any(ignored, name))
    if missing or extra:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[])


def _check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], users: set[str]) -> None:
    missing = [name for name in shapes if name not in state]
    extra = [name for name in state if name not in shapes and name not in users]
    wrong = [
        f"{name}: {tuple(state[name].shape)} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=wrong)


def _write_weights(directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    free = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > free:
            shards.append({})
            free = max_shard_bytes
        shards[-1][name] = tensor
        free -= tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # One shard at a time, so that copies of transposed views are few.
        contiguous = {name: tensor.detach().to(HOST).contiguous() for name, tensor in shard.items()}
        save_file(contiguous, directory / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _read_json(directory: Path, file: str) -> dict[str, Any]:
    path = directory / file
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HFFileMissing(directory=str(directory), wanted=f"'{file}'") from error
    except (OSError, ValueError) as error:
        raise HFFileDamaged(path=str(path), reason=str(error)) from error
    if not isinstance(content, dict):
        raise HFFileDamaged(path=str(path), reason="it is no JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + os.linesep, encoding="utf-8")
