"""The files that transformers loads a SentencePiece model of merges from, with the ids that SentencePiece itself gives.

Of a ``tokenizer.model`` alone transformers ranks merges by id. Released models of Llama 2 and Mistral have pieces of
spaces whose scores are in another order, and words behind several spaces then get other ids. So the merges are written,
by score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nxdt_core.data.tokenizers.files import import_library

__all__ = ["pretrained_files"]

_SPACE = "▁"
_BPE = 2
"""Model type of the trainer's specification."""
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Types of pieces."""


def pretrained_files(content: bytes, added: Mapping[str, int], names: Mapping[str, str | None]) -> dict[str, bytes]:
    """Return the model file, ``tokenizer.json`` and ``tokenizer_config.json``.

    Empty for a model that these cannot say: one of unigrams, and one that normalises text or merges its spaces.

    Args:
        content: of the model file.
        added: tokens that texts may spell out → their ids.
        names: ``bos_token``, ``eos_token``, ``pad_token`` → the token in use, or None.
    """
    described = import_library(
        "sentencepiece.sentencepiece_model_pb2", tokenizer="sentencepiece", extra="sentencepiece"
    )
    model = described.ModelProto.FromString(content)
    normalizer = model.normalizer_spec
    plain = normalizer.name == "identity" and not normalizer.remove_extra_whitespaces and normalizer.add_dummy_prefix
    if model.trainer_spec.model_type != _BPE or not plain:
        return {}
    unknown = model.pieces[model.trainer_spec.unk_id].piece
    record = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    return {
        "tokenizer.model": content,
        "tokenizer.json": _tokenizer(model.pieces, unknown, added).to_str().encode(),
        "tokenizer_config.json": json.dumps(record, indent=2).encode(),
    }


def _tokenizer(pieces: Sequence[Any], unknown: str, added: Mapping[str, int]) -> Any:
    library = import_library("tokenizers", tokenizer="sentencepiece", extra="huggingface")
    vocabulary = {piece.piece: id_ for id_, piece in enumerate(pieces)}
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {**vocabulary, **added},
            _merges(pieces, vocabulary),
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
    own = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    tokenizer.add_tokens([library.AddedToken(token, normalized=False) for token in own])
    special = [*(piece.piece for piece in pieces if piece.type == _CONTROL), *added]  # as chat templates write them
    tokenizer.add_special_tokens([library.AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _merges(pieces: Sequence[Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs that make a piece, the piece with the highest score first."""
    ranked = sorted(pieces, key=lambda piece: -piece.score)  # stable: equal scores stay in the order of ids
    return [
        (text[:cut], text[cut:])
        for text in (piece.piece for piece in ranked)
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
