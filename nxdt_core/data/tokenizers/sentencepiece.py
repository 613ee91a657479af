"""Tokenizers of a SentencePiece model file (Kudo & Richardson 2018, arXiv:1808.06226).

transformers ranks merges by id, of a ``tokenizer.model`` alone. Released models of Llama 2 and Mistral have pieces of
spaces whose scores are in another order, and words behind several spaces then get other ids. So the files for
transformers have the merges written, by score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.data.tokenizers.config import SentencePieceTokenizerConfig
from nxdt_core.data.tokenizers.files import FAST_TOKENIZER, encoded, holds_ranks, import_library, read_file, valid
from nxdt_core.errors.data import BadTokenizerConfig, BadTokenizerFile, RanksForSentencePiece
from nxdt_core.protocols.tokenizer import LocatedIds, Tokenizer

_SPACE = "▁"
_BPE = 2
"""Model type of the trainer's specification."""
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Types of pieces."""


def _tokenizer(pieces: Sequence[Any], unknown: str, added: Mapping[str, int]) -> Any:
    library = import_library("tokenizers", tokenizer="sentencepiece", extra="huggingface")
    vocabulary = {piece.piece: id_ for id_, piece in enumerate(pieces)}
    ranked = sorted(pieces, key=lambda piece: -piece.score)  # stable: equal scores stay in the order of ids
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {**vocabulary, **added},
            [
                (text[:cut], text[cut:])
                for text in (piece.piece for piece in ranked)
                for cut in range(1, len(text))
                if text[:cut] in vocabulary and text[cut:] in vocabulary
            ],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(piece.type == _BYTE for piece in pieces),
        )
    )
    normalizers, decoders = library.normalizers, library.decoders
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    user_defined = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    tokenizer.add_tokens([library.AddedToken(token, normalized=False) for token in user_defined])
    special = [*(piece.piece for piece in pieces if piece.type == _CONTROL), *added]  # as chat templates write them
    tokenizer.add_special_tokens([library.AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def cut(tokens: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """Yield ``text`` in parts, split before and after each of ``tokens``, with the position where each part begins."""
    at = 0
    for match in tokens.finditer(text):
        yield at, text[at : match.start()]
        yield match.start(), match[0]
        at = match.end()
    yield at, text[at:]


class SentencePieceTokenizer(Tokenizer):
    """Wraps ``sentencepiece.SentencePieceProcessor``; tokens may be appended to its vocabulary.

    Raises:
        TokenizerLibraryMissing: sentencepiece is not installed.
        TokenizerFileNotFound: there is no such file.
        BadTokenizerFile, RanksForSentencePiece: the file is not a SentencePiece model.
        BadTokenizerConfig: the keys contradict each other, or name a token that neither is there nor is appended.
    """

    def __init__(self, config: SentencePieceTokenizerConfig) -> None:
        for key, message in config.check():
            raise BadTokenizerConfig(key=f"data.tokenizer.{key}", reason=message)
        library = import_library("sentencepiece", tokenizer="sentencepiece", extra="sentencepiece")
        content = read_file(config.model, key="data.tokenizer.model", wanted="SentencePiece model file")
        self._processor = _parse(library, content, config.model)
        self._content = content
        self._own_size: int = self._processor.vocab_size()
        self._added: dict[str, int] = {}
        """Ids of the tokens that texts may spell out: appended ones, and further ones that the model has already."""
        self._appended: dict[int, str] = {}
        roles = [token for token in (config.bos_token, config.eos_token, config.pad_token) if token is not None]
        for token in dict.fromkeys((*roles, *config.special_tokens)) if config.sentencepiece_legacy else ():
            id_ = self._own_id(token)
            if id_ is None:
                self._added[token] = self._own_size + len(self._appended)
                self._appended[self._added[token]] = token
            elif token in config.special_tokens:
                self._added[token] = id_
        self._parts = _any_of(self._added)
        numbers = range(self._own_size)
        controls = {self._processor.id_to_piece(id_): id_ for id_ in numbers if self._processor.is_control(id_)}
        self._reserved = {**controls, **self._added}
        self._reserved_parts = _any_of(self._reserved)
        self.vocab_size: int = self._own_size + len(self._appended)
        self.bos_id: int | None = self._special("bos_token", config.bos_token, self._processor.bos_id())
        self.eos_id: int | None = self._special("eos_token", config.eos_token, self._processor.eos_id())
        self.pad_id: int | None = self._special("pad_token", config.pad_token, self._processor.pad_id())
        plain = config == SentencePieceTokenizerConfig(model=config.model)
        more = () if plain else (self._added, self.bos_id, self.eos_id)
        self._fingerprint = digest("sentencepiece", content, *more)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, normalised by the model's own rules; no special tokens are added, a lone
        surrogate becomes U+FFFD."""
        ids: list[int] = []
        for _, part in cut(self._parts, valid(text)):
            ids += [self._added[part]] if part in self._added else self._processor.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the same for many texts, on the library's threads."""
        if self._added:
            return [self.encode(text) for text in texts]
        ids: list[list[int]] = encoded(self._processor.encode, texts)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; control and appended tokens and ids that are not in the vocabulary are left
        out."""
        text: str = self._processor.decode([i for i in ids if 0 <= i < self._own_size])
        return text

    def special_tokens(self) -> Mapping[str, str]:
        """Return the begin, end, padding and unknown token, where they exist."""
        ids = {**self._roles(), "unk_token": self._processor.unk_id()}
        return {key: self._name(id_) for key, id_ in ids.items() if id_ is not None}

    def reserved_tokens(self) -> Sequence[str]:
        """Control tokens of the model, and those that the configuration lets texts spell out."""
        return list(self._reserved)

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of :meth:`encode_batch` with positions; control tokens are read too, and the text between them
        by itself."""
        located: list[LocatedIds] = []
        for text in texts:
            ids: list[int] = []
            places: list[tuple[int, int]] = []
            for at, part in cut(self._reserved_parts, valid(text)):
                if part in self._reserved:
                    ids.append(self._reserved[part])
                    places.append((at, at + len(part)))
                    continue
                # Together the surfaces are the text. Of a character's bytes only the last has it; all are given it.
                pieces = self._processor.encode(part, return_type="proto").pieces if part else ()
                first = len(places)
                for piece in pieces:
                    ids.append(piece.id)
                    places.append((at, at := at + len(piece.surface)))
                for number in reversed(range(first, len(places) - 1)):
                    start, end = places[number]
                    if start == end and self._processor.is_byte(ids[number]):
                        places[number] = start, places[number + 1][1]
            starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
            located.append(LocatedIds(ids=np.array(ids, dtype=np.int64), starts=starts, ends=ends))
        return located

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of :meth:`decode`, with special tokens as they are written."""
        names = {id_: token for token, id_ in self._reserved.items()}
        runs = groupby((id_ for id_ in ids if 0 <= id_ < self.vocab_size), names.__contains__)
        return "".join("".join(names[id_] for id_ in run) if special else self.decode(run) for special, run in runs)

    def fingerprint(self) -> str:
        """Digest of the model file and of what the configuration adds to it."""
        return self._fingerprint

    def hf_files(self) -> Mapping[str, bytes]:
        """Return the model file, ``tokenizer.json`` and ``tokenizer_config.json``, of which transformers makes the same
        ids.

        Empty for a model that these cannot say: one of unigrams, and one that normalises text or merges its spaces.
        """
        described = import_library(
            "sentencepiece.sentencepiece_model_pb2", tokenizer="sentencepiece", extra="sentencepiece"
        )
        model = described.ModelProto.FromString(self._content)
        rules = model.normalizer_spec
        plain = rules.name == "identity" and not rules.remove_extra_whitespaces and rules.add_dummy_prefix
        if model.trainer_spec.model_type != _BPE or not plain:
            return {}
        unknown = model.pieces[model.trainer_spec.unk_id].piece
        names = {key: None if id_ is None else self._name(id_) for key, id_ in self._roles().items()}
        record = {**FAST_TOKENIZER, "unk_token": unknown, "clean_up_tokenization_spaces": False, **names}
        return {
            "tokenizer.model": self._content,
            "tokenizer.json": _tokenizer(model.pieces, unknown, self._added).to_str().encode(),
            "tokenizer_config.json": json.dumps(record, indent=2).encode(),
        }

    def _own_id(self, token: str) -> int | None:
        """Id of a piece of the model; the library gives that of the unknown piece for any it does not have."""
        id_: int = self._processor.piece_to_id(token)
        return id_ if self._processor.id_to_piece(id_) == token else None

    def _special(self, key: str, configured: str | None, of_model: int) -> int | None:
        if configured is None:
            return of_model if of_model >= 0 else None  # the library's −1 is a token that the model does not have
        id_ = self._added.get(configured, self._own_id(configured))
        if id_ is None:
            reason = f"{configured!r} is not in the vocabulary of the model; sentencepiece_legacy: true appends it"
            raise BadTokenizerConfig(key=f"data.tokenizer.{key}", reason=reason)
        return id_

    def _roles(self) -> dict[str, int | None]:
        return {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}

    def _name(self, id_: int) -> str:
        name: str = self._processor.id_to_piece(id_) if id_ < self._own_size else self._appended[id_]
        return name


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of ``tokens``; without any, it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _parse(library: Any, content: bytes, path: Path) -> Any:
    if holds_ranks(content):
        raise RanksForSentencePiece(path=str(path))
    # An empty model is "valid" to the library, whose first call then fails.
    try:
        processor = library.SentencePieceProcessor(model_proto=content) if content else None
    except (RuntimeError, OSError) as error:
        raise BadTokenizerFile(path=str(path), wanted="SentencePiece model", reason=str(error)) from error
    if processor is None or processor.vocab_size() < 1:
        raise BadTokenizerFile(path=str(path), wanted="SentencePiece model", reason="it holds no vocabulary")
    return processor
