"""``model.model_config``: values of a Hugging Face ``config.json`` below the keys that the user gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxdt_core.config.fields.component import NamesHFKeys, ReadsHFConfig
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.fields.keys import keys_of
from nxdt_core.config.huggingface.bounds import oversized, weights_in
from nxdt_core.config.huggingface.values import architectures_of
from nxdt_core.config.resolve.path_values import Locator
from nxdt_core.config.sources.files import file_problem
from nxdt_core.config.sources.node import Node, Origin, from_plain
from nxdt_core.config.sources.paths import PackageNotFound, resolve_path
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, ComponentFinding, ConfigProblem, ConfigUnreadable
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_core.regular_files import read_text

__all__ = ["HFConfig", "merge_hf_values", "read_hf_config"]

_KEY = "model.model_config"


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A Hugging Face ``config.json``: its values, its path, or why it cannot be read."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    problem: ConfigProblem | None = None
    """Why it cannot be read; irrelevant where the user sets every key of the model."""


def read_hf_config(view: Node, locator: Locator) -> HFConfig:
    """Read the file that ``model.model_config`` names; nothing where it names none."""
    node = view.find(_KEY)
    if node is None or not isinstance(node.value, str) or not node.value:
        return HFConfig()
    place = node.origin.at(_KEY)
    try:
        path = resolve_path(locator.locate(node).value)
    except PackageNotFound:  # reported as a wrong value when it is read
        return HFConfig()
    try:
        path = path / "config.json" if path.is_dir() else path
        parsed = json.loads(read_text(path, follow=True))
    except (OSError, UnicodeDecodeError) as error:
        return HFConfig(path=path, problem=file_problem(path, error, place))
    except (ValueError, RecursionError) as error:
        return HFConfig(path=path, problem=ConfigUnreadable(**place, path=str(path), reason=f"not valid JSON: {error}"))
    if not isinstance(parsed, dict):
        return HFConfig(path=path, problem=ConfigUnreadable(**place, path=str(path), reason="not a JSON object"))
    try:
        architectures_of(parsed)
    except HFFileDamaged as error:
        return HFConfig(path=path, problem=ConfigUnreadable(**place, path=str(path), reason=error.reason))
    weights = weights_in(path.parent)
    reason = None if weights is None else oversized(parsed, tensors=weights[0], size_bytes=weights[1])
    if reason is not None:
        damaged = HFFileDamaged(path=str(path), reason=reason)
        return HFConfig(path=path, problem=BadComponentChoice(**place, error=damaged))
    return HFConfig(values=parsed, path=path)


def merge_hf_values(given: Node, composition: Composition, hf: HFConfig) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with the file's values for keys of the model that it lacks."""
    cls, node = composition.classes.get("model"), given.find(_KEY)
    if hf.path is None or node is None or cls is None:
        return given, []
    section = given.find("model")
    lacking = [name for name in keys_of(cls) if section is None or name not in section.children]
    if not lacking:
        return given, []
    place = node.origin.at(_KEY)
    if hf.problem is not None:
        return given, [hf.problem]
    if not issubclass(cls, ReadsHFConfig):
        message = f"{composition.label('model')} reads no Hugging Face configuration."
        advice = f"Give its keys in the section model, or add the class method from_hf(hf) to {cls.__qualname__}."
        return given, [ComponentFinding(**place, message=message, advice=advice)]
    try:
        values = cls.from_hf(hf.values)
    except NxdtError as error:
        if isinstance(error, (HFFileDamaged, HFUnsupported)):
            error.path = str(hf.path)  # a plugin only gets its content
        return given, [BadComponentChoice(**place, error=error)]
    except (ValueError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return given, [ConfigUnreadable(**place, path=str(hf.path), reason=reason)]
    except (TypeError, AttributeError) as error:  # a value of a type that it does not expect, or its own mistake
        message = f"{cls.__qualname__}.from_hf cannot read '{hf.path}': {type(error).__name__}: {error}."
        advice = f"Correct that file. If it is right, correct from_hf: {composition.label('model')} offers the class."
        return given, [ComponentFinding(**place, message=message, advice=advice)]
    names = cls.hf_names(hf.values) if issubclass(cls, NamesHFKeys) else {}
    for name, value in values.items():
        if name in lacking or ("." in name and given.find(f"model.{name}") is None):
            own = theirs if (theirs := names.get(name, "")) in hf.values else ""
            origin = Origin(kind="hf", where=str(hf.path), own=own)
            given = given.set(f"model.{name}", from_plain(value, origin))
    return given, []
