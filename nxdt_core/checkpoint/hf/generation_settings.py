"""``generation_config.json`` and the token ids of ``config.json`` in an export.

They come from the run's tokenizer and chat template, and from the directory that the weights came from. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nxdt_core.checkpoint.hf.source import SPECIAL, HFSource
from nxdt_core.config.huggingface import older_rope
from nxdt_core.errors.base import listing
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["HFSettings", "hf_settings"]

_MOST_SUPPRESSED = 1024
"""Rows of the embedding beyond the tokenizer's ids that are padding, and are kept from being generated; where there are
more, the tokenizer is not that of the model."""
_CARRIED = (
    *("*_token_id", "use_cache", "pretraining_tp", "task_specific_params", "output_router_logits", "is_decoder"),
    *("summary_*", "reorder_and_upcast_attn", "classifier_dropout"),
)
"""Keys of ``config.json`` that say how the model is used, and not what its logits are."""
_REWRITTEN = (
    *("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "architectures", "model_type"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"),
    "original_max_position_embeddings",
)
"""Keys of ``config.json`` that an export words otherwise, or that are of the program that wrote the file."""
_OF_THE_WRITER = ("transformers_version", "_from_model_config")
"""Keys of ``generation_config.json`` that are of the program that wrote the file."""
_HOLD_IDS = (
    *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "bad_words_ids", "force_words_ids"),
    *("sequence_bias", "lang_to_id", "task_to_id"),
)
"""Keys of ``generation_config.json`` with token ids, in addition to those that end in ``_token_id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSettings:
    """What two files of an export say."""

    config: Mapping[str, Any]
    """Content of ``config.json``."""
    generation: Mapping[str, Any] | None
    """Content of ``generation_config.json``; None: it is left out."""
    notes: tuple[str, ...]
    """What the source had and the export lacks, a sentence each."""


def hf_settings(
    built: Mapping[str, Any], tokenizer: Tokenizer | None, stop_ids: Sequence[int], source: HFSource | None
) -> HFSettings:
    """Merge what the run says with what its source said. Where both name a token, the run's tokenizer wins.

    Args:
        built: ``config.json`` as the builder writes it.
        tokenizer: of the run.
        stop_ids: tokens that end what the model writes, by the run's tokenizer and chat template.
        source: the directory that the weights came from; None: they came from elsewhere.
    """
    fits = source is not None and source.fits(tokenizer)
    said: Mapping[str, Any] = built if source is None else source.config if fits else {}
    own = {key: getattr(tokenizer, f"{key.removesuffix('_token_id')}_id", None) for key in SPECIAL}
    tokens = {key: _token(said.get(key), own[key]) for key in SPECIAL}
    config = {**_carried(said), **older_rope(built), **built, **tokens}
    generation = {} if source is None else _kept(source.generation, fits=fits)
    has_file = tokenizer is not None or bool(generation)
    generation |= {key: value for key, value in own.items() if value is not None}
    stops = [*dict.fromkeys((*(source.stop_ids if source is not None and fits else ()), *stop_ids))]
    if stops:
        generation["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    padding = [] if tokenizer is None else list(range(tokenizer.vocab_size, built.get("vocab_size") or 0))
    if 0 < len(padding) <= _MOST_SUPPRESSED:
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or ()), *padding})
    notes = () if source is None else tuple(_notes(source, config, fits=fits))
    return HFSettings(config=config, generation=generation if has_file else None, notes=notes)


def _token(said: Any, own: int | None) -> Any:
    """Return the token of the run's tokenizer, within the list of several that the source said, if it is one."""
    if own is None or (isinstance(said, (list, tuple)) and own in said):
        return said
    return own


def _carried(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a builder does not know and that are true of any model with these weights."""
    return {key: value for key, value in said.items() if _is_carried(key)}


def _is_carried(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in _CARRIED)


def _kept(generation: Mapping[str, Any], *, fits: bool) -> dict[str, Any]:
    return {
        key: value
        for key, value in generation.items()
        if key not in _OF_THE_WRITER and (fits or not (key in _HOLD_IDS or key.endswith("_token_id")))
    }


def _notes(source: HFSource, config: Mapping[str, Any], *, fits: bool) -> Iterator[str]:
    if not fits:
        yield f"the token ids of {source.path!r} are not kept: the run's tokenizer gives them to other tokens"
    lost = [
        key
        for key, value in source.config.items()
        if value is not None and key not in config and key not in _REWRITTEN and not _is_carried(key)
    ]
    if lost:
        yield f"config.json of {source.path!r} has keys that this model's export does not write: {listing(lost)}"
    if source.left_out:
        yield f"not copied from {source.path!r}: {listing(source.left_out)}"
