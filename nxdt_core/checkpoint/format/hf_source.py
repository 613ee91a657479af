"""A Hugging Face directory without its weights: its JSON files, and what it says of using its model. Torch-free.

Weights and sizes are the builder's business. Here are stop tokens, ``generation_config.json`` and the names of files
that no export writes. A checkpoint keeps them in its manifest (``CheckpointFacts.hf``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nxdt_core.errors.models import HFFileDamaged, HFFileMissing
from nxdt_core.models.huggingface import spell_floats
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.system.regular_files import read_text, require_inside

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of ``config.json`` and ``generation_config.json`` that hold one token id, a list of them, or null."""
_WRITTEN = (
    *(CONFIG, GENERATION_CONFIG, "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "chat_template.jinja", "chat_template.json"),
)
"""Files that an export writes itself, of the builder's weights or of the run's tokenizer."""
_WEIGHTS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")
"""Patterns of files that have the same weights in other formats."""
_MOST_FILES = 64


def read_json(directory: Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory.

    Raises:
        HFFileMissing: the file does not exist.
        HFFileDamaged: it does not hold a JSON object.
    """
    path = directory / file
    try:
        require_inside(path, directory)
        content = json.loads(read_text(path, follow=True))
    except FileNotFoundError as error:
        raise HFFileMissing(directory=str(directory), wanted=f"'{file}'") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HFFileDamaged(path=str(path), reason=getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(content, dict):
        raise HFFileDamaged(path=str(path), reason="it does not hold a JSON object")
    return content


def read_optional_json(directory: Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory; empty if the file does not exist.

    Raises:
        HFFileDamaged: it does not hold a JSON object.
    """
    return read_json(directory, file) if (directory / file).exists() else {}


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file. JSON has no infinities: they are written as transformers 5 spells them."""
    return (json.dumps(spell_floats(content), indent=2, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSource:
    """One directory. Everything is JSON-able."""

    path: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``config.json``."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``generation_config.json``; empty without one."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Id (in decimal digits) of a special token → its text, as far as ``tokenizer.json`` says."""
    left_out: tuple[str, ...] = ()
    """Files that no export writes, such as a licence."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> HFSource | None:
        """Return what :meth:`facts` gave; None for the empty mapping of weights that came from elsewhere.

        Keys that a later version adds are left out.

        Raises:
            ValueError: a value is missing or of another type.
        """
        if not facts:
            return None
        values: dict[str, Any] = {item.name: facts.get(item.name) for item in fields(cls)}
        kinds = {"path": str, "config": dict, "generation": dict, "tokens": dict, "left_out": list}
        wrong = [name for name, kind in kinds.items() if not isinstance(values[name], kind)] or [
            f"{name}.{key}"
            for name in ("config", "generation")
            for key in SPECIAL
            if not _are_ids(values[name].get(key))
        ]
        if wrong:
            raise ValueError(f"the value of 'hf.{wrong[0]}' is not of its type")
        return cls(**{**values, "left_out": tuple(values["left_out"])})

    def facts(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self) | {"left_out": [*self.left_out]}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end what the model writes, by either file."""
        files = self.generation, self.config
        return tuple(dict.fromkeys(id_ for file in files for id_ in _ids(file.get("eos_token_id"))))

    def stops_of(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Return :attr:`stop_ids` where they mean the same under ``tokenizer``, else nothing."""
        return self.stop_ids if self.fits(tokenizer) else ()

    def fits(self, tokenizer: Tokenizer | None) -> bool:
        """Return whether the special ids of the directory mean the same tokens under ``tokenizer``."""
        if tokenizer is None:
            return True
        files = self.generation, self.config
        ids = {id_ for file in files for key in SPECIAL for id_ in _ids(file.get(key)) if id_ >= 0}
        within = all(id_ < tokenizer.vocab_size for id_ in ids)
        named = [id_ for id_ in ids if str(id_) in self.tokens]
        return within and all(tokenizer.spell([id_]) == self.tokens[str(id_)] for id_ in named)


def read_hf_source(directory: Path) -> HFSource:
    """Read what a Hugging Face directory says of using its model.

    Raises:
        HFFileMissing: the directory has no ``config.json``.
        HFFileDamaged: a file does not hold a JSON object, or a token id is not an integer.
    """
    config, generation = read_json(directory, CONFIG), read_optional_json(directory, GENERATION_CONFIG)
    ids: set[int] = set()
    for file, content in ((CONFIG, config), (GENERATION_CONFIG, generation)):
        for key in SPECIAL:
            value = content.get(key)
            if not _are_ids(value):
                reason = f"{key} must be a token id, a list of token ids or null, and is {value!r}"
                raise HFFileDamaged(path=str(directory / file), reason=reason)
            ids.update(_ids(value))
    added, tokens = read_optional_json(directory, "tokenizer.json").get("added_tokens"), dict[str, str]()
    for token in added if isinstance(added, list) else ():
        if not isinstance(token, dict) or type(token.get("id")) is not int or token["id"] not in ids:
            continue
        if isinstance(token.get("content"), str):
            tokens[str(token["id"])] = token["content"]
    paths = [path for path in sorted(directory.iterdir()) if not path.name.startswith(".")]
    others = [p for p in paths if not any(fnmatchcase(p.name, pattern) for pattern in (*_WRITTEN, *_WEIGHTS))]
    return HFSource(
        path=str(directory.absolute()),
        config=config,
        generation=generation,
        tokens=tokens,
        left_out=tuple(f"{path.name}/" if path.is_dir() else path.name for path in others[:_MOST_FILES]),
    )


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a value that :func:`_are_ids` accepts."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _are_ids(value: object) -> bool:
    """Return whether a value is a token id, a list of them or None."""
    return value is None or all(type(item) is int for item in (value if isinstance(value, list) else [value]))
