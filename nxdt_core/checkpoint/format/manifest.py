"""The manifest: the one file whose existence commits a checkpoint, and all that is known of it without a tensor.

It is JSON that carries a digest of itself. Any changed byte, also one that leaves the JSON valid, makes it damaged.

Digests are xxh3 with 128 bits: ten times as fast as SHA-256 per CPU-second. It detects accidents (a flipped bit escapes
with probability 2⁻¹²⁸), not forgery: anybody can make other bytes with the same digest. A signed checkpoint has SHA-256
digests, so that the signature of its manifest covers every byte of its files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from math import prod
from typing import Any, Final, Literal, get_args

from xxhash import xxh3_128

from nxdt_core.checkpoint.format import file_names
from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.checkpoint.format.state_tree import decode_tree, encode_tree
from nxdt_core.checkpoint.format.tensor_index import TensorEntry, check_places, decode_index, encode_index
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointTooNew

Algorithm = Literal["xxh3_128", "sha256"]
FAST: Final = "xxh3_128"
STRONG: Final = "sha256"
"""Digest of signed checkpoints: no attacker can make other bytes with the same digest."""

HASHES: Mapping[str, Callable[..., Any]] = {FAST: xxh3_128, STRONG: hashlib.sha256}
"""Hash of each algorithm, to begin a digest with."""


_FORMATS: Mapping[int, Algorithm] = {1: FAST, 2: STRONG}
"""Version of the layout and of this file → algorithm of its digests; a reader refuses another version. The digest of
the manifest itself is the fast one in both, so that a reader that knows only version 1 recognizes a newer one."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
Keep = Literal["regular", "permanent", "ephemeral"]
"""``regular``: kept as the policy says. ``permanent``: never deleted. ``ephemeral``: kept until a newer checkpoint is
committed."""


def digest(data: bytes | bytearray | memoryview, algorithm: Algorithm = FAST) -> str:
    """Return the name of the algorithm and hexadecimal digest: ``xxh3_128:99aa…``."""
    return f"{algorithm}:{HASHES[algorithm](data).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Facts that a run records about itself in addition to its state. All values can be written as JSON."""

    consumed_samples: int = 0
    consumed_tokens: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration."""
    plugin_fingerprint: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Distribution, version and digest of the files of each usable plugin, by its name; empty where not known."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Size by dimension of the mesh that wrote it; any other mesh can load it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Version by distribution."""
    updates: int = 0
    """Optimizer steps so far that can have changed the weights: the learning rate was above zero, the loss finite."""
    keep: Keep = "regular"
    """Kind of the checkpoint, by which retention keeps or deletes it."""
    fencing: int = 0
    """Number of the ownership under which it was saved, greater for every later owner; 0: no run owned the store."""
    base: str = ""
    """Digest of the frozen weights below an adapter; empty without one."""
    without_base: bool = False
    """The checkpoint leaves the frozen weights out."""
    elements: int = 0
    """Elements of the weights by the model's own count, a tied one once; 0: not known."""
    hf: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the use of the model, from the Hugging Face directory of the weights
    (:meth:`nxdt_core.checkpoint.format.hf_source.HFSource.facts`); empty where they came from elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One data file; its digests by block are next to it."""

    size_bytes: int
    digests_bytes: int
    """Size of the file of its digests."""
    digests_digest: str
    """Digest of the file of its digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed checkpoint. File names are relative to its attempt's directory."""

    step: int
    attempt: str
    created: str
    """Time of the save in UTC, ISO 8601."""
    facts: CheckpointFacts
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    """Section (``model``, ``optim``, ``state``) → tensor name → location of the tensor."""
    digests: Algorithm = FAST
    """Algorithm of the digests of all files."""

    @property
    def prefix(self) -> str:
        """Prefix of the keys of its files."""
        return file_names.attempt_prefix(self.step, self.attempt)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files, without the manifest itself."""
        return sum(entry.size_bytes + entry.digests_bytes for entry in self.files.values())

    @property
    def stored_elements(self) -> int:
        """Elements of the weights that its files hold."""
        weights = self.tensors.get("model", {})
        return sum(prod(entry.shape) for entry in weights.values() if entry.same_as is None)


def encode_facts(facts: CheckpointFacts) -> dict[str, Any]:
    """Return the facts as JSON-able keys of the manifest.

    Raises:
        UnsavableState: something in them is not JSON-able.
    """
    return {item.name: encode_tree(getattr(facts, item.name), at=item.name) for item in fields(facts)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    table: dict[str, Any] = {
        "format": next(number for number, digests in _FORMATS.items() if digests == manifest.digests),
        "step": manifest.step,
        "attempt": manifest.attempt,
        "created": manifest.created,
        **encode_facts(manifest.facts),
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "tensors": {section: encode_index(index) for section, index in manifest.tensors.items()},
    }
    content = _dump(table)
    return _with_digest(content, digest(content))


def decode_manifest(data: bytes, *, step: int, where: str) -> Manifest:
    """Return the inverse of :func:`encode_manifest`, for the manifest at ``where`` under ``step``.

    Raises:
        CheckpointDamaged: a byte differs from what was written, or it is not a manifest of ``step``.
        CheckpointTooNew: a later version of nxdt-core wrote it.
    """
    try:
        table = json.loads(data)
        stored = table.pop("digest")
        content = _dump(table)
        unchanged = digest(content) == stored and _with_digest(content, stored) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(where=where, reason="it is not a manifest") from error
    if not unchanged:
        raise CheckpointDamaged(where=where, reason="it differs from its digest")
    if table.get("format") not in list(_FORMATS):  # it may be unhashable
        formats = " and ".join(map(str, _FORMATS))
        raise CheckpointTooNew(where=where, reason=f"its format is {table.get('format')!r}, known are {formats}")
    try:
        manifest = _from_table(table)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(where=where, reason=f"it is not a manifest ({error})") from error
    stored, counted = manifest.stored_elements, manifest.facts.elements
    if counted and stored != counted:  # digests agree also where a save has left something out
        raise CheckpointDamaged(where=where, reason=f"it stores {stored} elements of a model that has {counted}")
    if manifest.step != step:
        raise CheckpointDamaged(where=where, reason=f"it is the manifest of step {manifest.step}")
    return manifest


def state_tensors(manifest: Manifest, name: str) -> list[str]:
    """Return the names of the tensors in the state that the file ``name`` holds, which is one of
    :func:`file_names.state_name`."""
    stem = name.removeprefix("state/").removesuffix(".json")
    return [tensor for tensor in manifest.tensors.get("state", {}) if tensor.startswith(f"{stem}/")]


def decode_rank_state(data: bytes, tensors: Mapping[str, Any], manifest: Manifest, *, where: str) -> dict[str, Any]:
    """Return the state tree of a rank from the bytes of its file at ``where``, after comparing its progress with the
    manifest; ``tensors`` as of :func:`decode_tree`.

    Raises:
        CheckpointDamaged: it is not a state, or it is that of another step.
    """
    try:
        state = decode_tree(json.loads(data), tensors)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(where=where, reason=f"it is not a state ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointDamaged(where=where, reason="it is not a state")
    progress = state.get("train", {})
    if not isinstance(progress, Mapping):
        raise CheckpointDamaged(where=where, reason="its 'train' is not a mapping")
    wanted = {"step": manifest.step, "consumed_samples": manifest.facts.consumed_samples}
    for name, value in wanted.items():
        recorded = progress.get(name, value)
        if type(recorded) is not int or recorded != value:
            raise CheckpointDamaged(where=where, reason=f"its {name} is {recorded!r}, and that of the manifest {value}")
    return state


def _from_table(table: Mapping[str, Any]) -> Manifest:
    # Facts that a later version adds are missing in what this one wrote, and have defaults.
    names = [item.name for item in fields(CheckpointFacts) if item.name in table]
    facts = CheckpointFacts(**{name: decode_tree(table[name]) for name in names})
    # Types and ranges: what reads a manifest takes them for granted.
    for name in ("consumed_samples", "consumed_tokens", "updates", "fencing", "elements"):
        _count(getattr(facts, name), name)
    for name in ("plugin_fingerprint", "base"):
        _require(type(getattr(facts, name)) is str, name)
    kinds = {"config": object, "hf": object, "versions": str, "plugins": str, "mesh": int, "metrics": (int, float)}
    for name, kind in kinds.items():
        mapping = getattr(facts, name)
        _require(isinstance(mapping, dict), name)
        for key, value in mapping.items():
            _require(type(key) is str and isinstance(value, kind), f"{name}.{key}")  # type: ignore[arg-type]
    _require(facts.keep in get_args(Keep), "keep")
    _require(type(facts.without_base) is bool, "without_base")
    HFSource.of_facts(facts.hf)
    digests, files = _FORMATS[table["format"]], dict[str, FileEntry]()
    for name, row in table["files"].items():
        at, files_digest = f"files.{_plain(name)}", row["digests_digest"]
        sizes = [_count(row[key], f"{at}.{key}") for key in ("size_bytes", "digests_bytes")]
        sound = type(files_digest) is str and files_digest.startswith(f"{digests}:")
        _require(sound, f"{at}.digests_digest")
        files[name] = FileEntry(size_bytes=sizes[0], digests_bytes=sizes[1], digests_digest=files_digest)
    ranks = sorted(filter(file_names.is_state_name, files))
    _require(ranks == [file_names.state_name(rank) for rank in range(len(ranks))], "files")
    tensors = {section: decode_index(index) for section, index in table["tensors"].items()}
    check_places(tensors, {name: entry.size_bytes for name, entry in files.items()})
    created = table["created"]
    if type(created) is not str or datetime.fromisoformat(created).isoformat(timespec="seconds") != created:
        raise ValueError("the value of 'created' is not a time")
    return Manifest(
        step=_count(table["step"], "step"),
        attempt=_plain(table["attempt"]),
        created=created,
        facts=facts,
        files=files,
        tensors=tensors,
        digests=digests,
    )


def _count(value: object, name: str) -> int:
    _require(type(value) is int and 0 <= value < 2**63, name)
    assert isinstance(value, int)
    return value


def _require(sound: bool, name: str) -> None:
    if not sound:
        raise ValueError(f"the value of {name!r} is not of its type")


def _plain(name: str) -> str:
    """The name, unless it could lead out of the checkpoint's directory, in any store."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in it")
    return name


def _with_digest(content: bytes, stored: str) -> bytes:
    """Return the JSON object ``content`` with its digest as the last key."""
    return b"%s,%s" % (content[:-1], _dump({"digest": stored})[1:])


def _dump(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
