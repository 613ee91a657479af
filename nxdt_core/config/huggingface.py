"""Values from a Hugging Face directory: from its ``config.json`` for the section ``model``, and defaults of a run that
starts from its weights. Also what a ``config.json`` from elsewhere may hold."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nxdt_core.config.hub import complete, local_path, name_of
from nxdt_core.config.read import has_interpolation
from nxdt_core.config.schema import ModelConfig
from nxdt_core.config.section import REQUIRED, Section, keys_of
from nxdt_core.config.sources import file_problem
from nxdt_core.config.tree import DEFAULT, Origin, Tree, plain, walk
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, ComponentFinding, ConfigProblem, ConfigUnreadable, Place
from nxdt_core.errors.hub import HubError
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_core.system.paths import PACKAGE_SCHEME, PackageNotFound, resolve_path
from nxdt_core.system.regular_files import open_regular, read_text, require_inside

_WEIGHTS = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
_COUNTS = re.compile(r"(^|[_.])(num|n)_\w*(layer|expert|block)|layers$")
"""Keys that count modules, each of which has a tensor at least."""
_LENGTHS = re.compile(r"position|length|window|context|seq|seed")
"""Keys that no tensor of a model has as a size, or that a check of shapes compares."""
_FEWEST = 1000
"""Layers or experts that take little memory in any case: some parts of a model have no tensors in a directory."""
_SMALLEST = 2**24
"""A size that takes little memory in any case; above all token ids."""
_LONGEST = 2**32
_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""
PUBLISHED, _KEY = "checkpoint.resume_from", "model.model_config"
_NOT_OF_ARCHITECTURES = keys_of(ModelConfig).keys() - {"name", "model_config"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_POSITIONS = ("max_position_embeddings", "n_positions")
_SEQ_LENGTH, _BATCH, _LR, _ADAPTER_LR = 2048, 8, 2e-5, 2e-4
"""Defaults of a run that starts from a published model. The rates are those of TRL's SFT and of the QLoRA paper."""


def architectures_of(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in ``architectures``; empty where the file has none.

    Raises:
        HFFileDamaged: they are not a list of strings.
    """
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise HFFileDamaged(
            path="config.json", reason=f"architectures must be a list of names, and is {architectures!r}"
        )
    return tuple(architectures)


def weights_in(directory: Path) -> tuple[int, int] | None:
    """Return the number of tensors and of bytes of the weights of a Hugging Face directory; None where it has none.

    Files that cannot be read have none: reading the weights explains them.
    """
    try:
        sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
        if (single := directory / _WEIGHTS).is_file():
            with open(open_regular(single, follow=True), "rb") as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                names = json.loads(stream.read(min(header_bytes, _MOST_HEADER_BYTES)))
        else:
            names = json.loads(read_text(directory / f"{_WEIGHTS}.index.json", follow=True))["weight_map"]
        return (len(names), sum(sizes)) if sizes else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def unusable(values: Mapping[str, Any], *, weights: tuple[int, int] | None) -> str | None:
    """Return why a mapping from someone else's file cannot become a part of a configuration; None if it can.

    It may hold no references, which would read this machine's environment, no halves of characters, and no numbers that
    float32 lacks. A model's configuration may name no sizes that its weights cannot have.

    Args:
        values: keys of a ``config.json``, of an ``adapter_config.json``, or of the section ``model``, at any depth.
        weights: number of tensors of the weights, and bytes of their files; None where there are none to compare with.
    """
    for path, value in walk(plain(values)):
        key = ".".join(part for part in path if isinstance(part, str))
        if has_interpolation(value):
            return f"{key} is the reference {value[:100]!r}, which is not resolved in a file from elsewhere"
        if isinstance(value, str) and value.encode("utf-8", "ignore").decode() != value:
            return f"{key} is {value[:100]!r}, which holds half a character"
        if type(value) is float and _LARGEST < abs(value) < math.inf:
            return f"{key} is {value!r}, which float32 cannot hold"
        if type(value) is int and weights is not None:
            tensors, size_bytes = weights
            if _COUNTS.search(key):
                limit = max(tensors, _FEWEST)
            else:
                limit = _LONGEST if _LENGTHS.search(key) else max(size_bytes, _SMALLEST)
            if value > limit:
                return f"{key} is {value}, too large for its weights (tensors: {tensors}, bytes: {size_bytes})"
    return None


def with_published_model(tree: Tree, view: Tree) -> tuple[Tree, bool]:
    """Return the tree with what the Hugging Face directory in ``checkpoint.resume_from`` gives below it, and whether
    that key names one.

    A path without a ``config.json`` counts, too, where nothing else describes the model: reading it reports the path.

    Args:
        tree: The values.
        view: The same values, with the reference of that key replaced.

    Raises:
        HubError: the path is a name of the Hugging Face hub, which cannot be resolved or has no weights.
    """
    named, origin = tree.get(PUBLISHED), tree.origin(PUBLISHED)
    path, model = view.get(PUBLISHED), tree.get("model") or {}
    described = isinstance(model, dict) and any(model[key] is not None for key in model.keys() - _NOT_OF_ARCHITECTURES)
    try:
        if not isinstance(path, str) or not path or ("://" in path and not path.startswith(PACKAGE_SCHEME)):
            return tree, False
        directory = resolve_path(local_path(path), view.origin(PUBLISHED).directory)
        complete(directory, download=False)
    except PackageNotFound:  # reported as a wrong value when it is read
        return tree, False
    if described and not os.path.isfile(directory / "config.json"):
        return tree, False
    value = f"${{{PUBLISHED}}}" if has_interpolation(named) else named
    values: dict[str, Any] = {"checkpoint": {"weight_init_only": True}, "model": {"model_config": value}}
    tokenizer = tree.get("data.tokenizer", {})
    other = not isinstance(tokenizer, dict) or tokenizer.keys() & {"library", "model", "type", "vocab_file"}
    if not other and any(os.path.isfile(directory / name) for name in _TOKENIZER):
        values["data"] = {"tokenizer": {"library": "huggingface", "model": value}}
    written = origin.at(PUBLISHED)["place"]
    default_origin = Origin(kind="hf", where=PUBLISHED, line=origin.line, written=written, directory=origin.directory)
    if tree.get("model") is None:  # a section without keys
        tree.remove("model")
    below = Tree.of(values, default_origin)
    below.merge(tree)
    return below, True


def fill_recipe(tree: Tree, hf: HFConfig) -> list[str]:
    """Set the keys of training that a run from a published model lacks; return a note on all that the model gave."""
    gave = [f"architecture ({', '.join(architectures_of(hf.values))})"] if _is_published(tree, _KEY) else []
    gave += ["tokenizer", "chat template"] if _is_published(tree, "data.tokenizer.model") else []
    of_model = (tree.get("model.max_position_embeddings"), *map(hf.values.get, _POSITIONS))
    defaults: dict[str, Any] = {
        "data.seq_length": min([_SEQ_LENGTH, *(length for length in of_model if type(length) is int)]),
        "data.global_batch_size": _BATCH,
    }
    if tree.get("model.optim.name") in (None, "adam", "adamw"):
        defaults["model.optim.lr"] = _ADAPTER_LR if tree.get("adapter.name") else _LR
    added = list[str]()
    for key, value in defaults.items():
        sections = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
        if key not in tree and all(isinstance(tree.get(section, {}), dict) for section in sections):
            tree.set(key, value, replace(DEFAULT, where="for a published model"))
            added.append(f"{key} {value:g}")
    note = f"{PUBLISHED} gives {', '.join(['weights', 'stop tokens', *gave])}"
    return [f"{note}; defaults: {', '.join(added)}" if added else note] if gave or added else []


def _place(tree: Tree) -> Place:
    return tree.origin(_KEY).at(PUBLISHED if _is_published(tree, _KEY) else _KEY)


def _is_published(tree: Tree, key: str) -> bool:
    return key in tree and tree.origin(key).kind == "hf" and tree.origin(key).where == PUBLISHED


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A Hugging Face ``config.json``: its values, its path, or why it cannot be read."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    problem: ConfigProblem | None = None
    """Why it cannot be read; irrelevant where the user sets every key of the model."""


def read_hf_config(view: Tree) -> HFConfig:
    """Read the file that ``model.model_config`` names; nothing where it names none."""
    named, origin = view.get(_KEY), view.origin(_KEY)
    if not isinstance(named, str) or not named:
        return HFConfig()
    place = _place(view)
    try:
        path = resolve_path(local_path(named), origin.directory)
    except (PackageNotFound, HubError):  # reported as a wrong value when it is read
        return HFConfig()
    problem: ConfigProblem
    try:
        if path.is_dir():
            path = path / "config.json"
            require_inside(path, path.parent)
        parsed = json.loads(read_text(path, follow=True))
        if not isinstance(parsed, dict):
            raise HFFileDamaged(path=str(path), reason="not a JSON object")
        architectures_of(parsed)
        # The weights of a model of the hub are downloaded later.
        weights = weights_in(path.parent) or ((0, 0) if name_of(path.parent) else None)
        if (reason := unusable(parsed, weights=weights)) is None:
            return HFConfig(values=parsed, path=path)
        problem = BadComponentChoice(**place, error=HFFileDamaged(path=str(path), reason=reason))
    except (OSError, UnicodeDecodeError) as error:
        problem = file_problem(path, error, place)
        if isinstance(error, FileNotFoundError) and _is_published(view, _KEY) and path.name == "config.json":
            message = f"'{path.parent}' has no config.json, and the section model describes no model."
            advice = "Name a Hugging Face directory, or write the keys of the model."
            problem = ComponentFinding(**place, message=message, advice=advice)
    except HFFileDamaged as error:
        problem = ConfigUnreadable(**place, path=str(path), reason=error.reason)
    except (ValueError, RecursionError) as error:
        problem = ConfigUnreadable(**place, path=str(path), reason=f"not valid JSON: {error}")
    return HFConfig(path=path, problem=problem)


def merge_hf_values(tree: Tree, cls: type | None, hf: HFConfig) -> list[ConfigProblem]:
    """Put the file's values into the tree for keys of the model that it lacks; return what is wrong with the file.

    Args:
        tree: The values.
        cls: Class of the model's section; None where it is not known.
        hf: The file.
    """
    if hf.path is None or _KEY not in tree or cls is None:
        return []
    keys = keys_of(cls)
    lacking = [name for name in keys if name not in tree.get("model")]
    place, model, problem = _place(tree), f"model {tree.get('model.name')!r}", hf.problem
    section, values = cls if issubclass(cls, Section) else Section, None
    if problem is None and lacking:
        try:
            values = section.from_hf(hf.values)
            if values is None:
                message = f"{model} reads no Hugging Face configuration."
                instead = f"add the class method from_hf(hf) to {cls.__qualname__}"
                advice = f"Give its keys in the section model, or {instead}."
                problem = ComponentFinding(**place, message=message, advice=advice)
        except NxdtError as error:
            if isinstance(error, (HFFileDamaged, HFUnsupported)):
                error.path = str(hf.path)  # a plugin only gets its content
            problem = BadComponentChoice(**place, error=error)
        except (ValueError, KeyError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            problem = ConfigUnreadable(**place, path=str(hf.path), reason=reason)
        except (TypeError, AttributeError) as error:  # a value of a type that it does not expect, or its own mistake
            message = f"{cls.__qualname__}.from_hf cannot read '{hf.path}': {type(error).__name__}: {error}."
            advice = f"Correct that file. If it is right, correct from_hf: {model} offers the class."
            problem = ComponentFinding(**place, message=message, advice=advice)
    if problem is not None and lacking:
        if _is_published(tree, _KEY) and all(keys[name].default is not REQUIRED for name in lacking):
            tree.remove(_KEY)  # the configuration describes another model for these weights
            return []
        return [problem]
    names = section.hf_names(hf.values) if values else {}
    for name, value in (values or {}).items():
        if name in lacking or ("." in name and f"model.{name}" not in tree):
            key_there = name_there if (name_there := names.get(name, "")) in hf.values else ""
            tree.set(f"model.{name}", value, Origin(kind="hf", where=str(hf.path), own=key_there))
    return []
