"""Values of a Hugging Face ``config.json`` in the section ``model``: names, bounds, floats. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from nxdt_core.config.interpolation import has_interpolation
from nxdt_core.config.read import located
from nxdt_core.config.schema import Composition
from nxdt_core.config.section import NamesHFKeys, ReadsHFConfig, keys_of
from nxdt_core.config.sources import PackageNotFound, file_problem, resolve_path
from nxdt_core.config.tree import Node, Origin, from_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, ComponentFinding, ConfigProblem, ConfigUnreadable
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported
from nxdt_core.system.regular_files import open_regular, read_text, require_inside

__all__ = [
    "HFConfig",
    "HFValues",
    "architectures_of",
    "merge_hf_values",
    "number_of",
    "older_rope",
    "read_floats",
    "read_hf_config",
    "rope_of",
    "spell_floats",
    "unusable",
    "weights_in",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HFValues:
    """Which of our keys correspond to which of theirs; ours are dotted where they are in a section of the model's."""

    model: str
    """For messages."""
    required: Mapping[str, str]
    """Ours → theirs, where a file must have the key."""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Ours → theirs, and what transformers takes where a file lacks the key."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Theirs → the values that are implemented, of features without a key of ours; the first is named in the error."""

    @property
    def names(self) -> dict[str, str]:
        """Return the key of the file for each key of ours."""
        return dict(self.required) | {ours: theirs for ours, (theirs, _) in self.optional.items()}

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our keys from those of a ``config.json``.

        Raises:
            HFUnsupported: the model has a feature that is not implemented.
            HFFileDamaged: a required key is missing.
        """
        for key, allowed in self.only.items():
            if hf_config.get(key) not in (*allowed, None):
                raise HFUnsupported(model=self.model, key=key, found=hf_config[key], supported=repr(allowed[0]))
        missing = [theirs for theirs in self.required.values() if theirs not in hf_config]
        if missing:
            raise HFFileDamaged(path="config.json", reason=f"it has no {', '.join(missing)}")
        ours = {key: hf_config[theirs] for key, theirs in self.required.items()}
        return ours | {key: hf_config.get(theirs, default) for key, (theirs, default) in self.optional.items()}

    def write(self, config: object) -> dict[str, Any]:
        """Their keys from the section, and the first implemented value of each feature."""
        features = {key: allowed[0] for key, allowed in self.only.items() if allowed[0] is not None}
        return features | {theirs: attrgetter(ours)(config) for ours, theirs in self.names.items()}


def architectures_of(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in ``architectures``; empty where the file has none.

    Raises:
        HFFileDamaged: they are not a list of strings.
    """
    found = hf_config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise HFFileDamaged(path="config.json", reason=f"architectures must be a list of names, and is {found!r}")
    return tuple(found)


def rope_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping that describes the rotary embedding; empty where the file has none.

    transformers 5 writes ``rope_parameters``; 4 wrote ``rope_scaling`` next to ``rope_theta``. Both versions let
    ``rope_scaling`` replace ``rope_parameters`` in a file with both: people add it to extend the context.

    Raises:
        HFFileDamaged: it is not a mapping.
    """
    for key in ("rope_scaling", "rope_parameters"):
        found = hf_config.get(key)
        if found and not isinstance(found, Mapping):
            raise HFFileDamaged(path="config.json", reason=f"{key} must be a mapping or null, and is {found!r}")
        if found:
            return dict(found)
    return {}


def older_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which transformers 4 looks for what ``rope_parameters`` says; empty where a file has none."""
    found = hf_config.get("rope_parameters") or {}
    rope, local = (
        found.get(kind, other) or {} for kind, other in (("full_attention", found), ("sliding_attention", {}))
    )
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return older
    name = "type" if kind == "longrope" else "rope_type"  # Phi-3 knows that by its first name alone
    rest = {key: value for key, value in rope.items() if key not in {"rope_type", *older, *hf_config}}
    return older | {"rope_scaling": {name: kind, **rest}}


def number_of(values: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number at ``key``, or ``default`` where there is none.

    Raises:
        HFFileDamaged: it is not a finite number.
    """
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise HFFileDamaged(path="config.json", reason=f"{key} must be a finite number, and is {found!r}")
    return float(found)


_TAG = "__float__"
_VALUES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_floats(value: Any) -> Any:
    """Return ``value`` with the floats that its spellings mean, at any depth."""
    if isinstance(value, Mapping):
        spelled = value.get(_TAG) if len(value) == 1 else None
        if isinstance(spelled, str) and spelled in _VALUES:
            return _VALUES[spelled]
        return {key: read_floats(each) for key, each in value.items()}
    return [read_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


def spell_floats(value: Any) -> Any:
    """Return ``value`` with a spelling for each float that JSON lacks, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: spell_floats(each) for key, each in value.items()}
    return [spell_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


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


def weights_in(directory: Path) -> tuple[int, int] | None:
    """Return the number of tensors and of bytes of the weights of a Hugging Face directory; None where it has none.

    Files that cannot be read have none: reading the weights explains them.
    """
    try:
        sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
        single = directory / _WEIGHTS
        names = (
            _header(single)
            if single.is_file()
            else json.loads(read_text(directory / f"{_WEIGHTS}.index.json", follow=True))["weight_map"]
        )
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
    for key, value in _scalars(values):
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


def _header(path: Path) -> Mapping[str, Any]:
    with open(open_regular(path, follow=True), "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(min(size, _MOST_HEADER_BYTES)))
    return header


def _scalars(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _scalars(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _scalars(each, key)
    else:
        yield key, value


_KEY = "model.model_config"


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A Hugging Face ``config.json``: its values, its path, or why it cannot be read."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    problem: ConfigProblem | None = None
    """Why it cannot be read; irrelevant where the user sets every key of the model."""


def read_hf_config(view: Node) -> HFConfig:
    """Read the file that ``model.model_config`` names; nothing where it names none."""
    node = view.find(_KEY)
    if node is None or not isinstance(node.value, str) or not node.value:
        return HFConfig()
    place = node.origin.at(_KEY)
    try:
        path = resolve_path(located(node).value)
    except PackageNotFound:  # reported as a wrong value when it is read
        return HFConfig()
    try:
        if path.is_dir():
            path = path / "config.json"
            require_inside(path, path.parent)
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
    reason = unusable(parsed, weights=weights_in(path.parent))
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
