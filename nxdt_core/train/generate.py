"""Trained models: loading one from a checkpoint or a directory with its tokenizer, and generating text with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.chat.rendering import Messages, prompt_ids, stop_ids
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.files.paths import decode, read_bytes
from nxdt_core.data.files.records import read_records
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.evaluation import PromptMissing
from nxdt_core.errors.models import SequenceTooLongForModel
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.continuation import Writer
from nxdt_core.train.sampling import Sampling
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.found import find_weights

__all__ = ["LoadedModel", "Sampling", "generate", "load_model", "prompts_in"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with a checkpoint's weights."""

    config: ResolvedConfig
    """Configuration of the run that wrote the weights."""
    model: ParallelModel
    tokenizer: Tokenizer
    chat_keys: ChatKeys
    """Settings by which the run's data made text of messages."""
    step: int
    """Optimizer steps that the weights have seen."""
    window: int
    """Tokens that it sees at once."""
    source: HFSource | None = None
    """The Hugging Face directory that the weights came from; None: they came from elsewhere."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens of :func:`~nxdt_core.data.chat.rendering.stop_ids`, and those that the weights' source names."""
        theirs = () if self.source is None else self.source.stops_of(self.tokenizer)
        return tuple(dict.fromkeys((*stop_ids(self.chat_keys, self.tokenizer), *theirs)))

    @cached_property
    def writer(self) -> Writer:
        """Generator that continues prompts."""
        return Writer(model=self.model, tokenizer=self.tokenizer, window=self.window, stop_ids=frozenset(self.stop_ids))

    def continuation(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yield the tokens that it writes behind ``ids``, until it ends the text or its turn."""
        return (token for _, token in self.writer.tokens([ids], sampling))

    def prompt(self, text: str | Messages, place: str = "The prompt") -> list[int]:
        """Return the tokens of a prompt: a text to continue, or messages, whose answer is asked for.

        Raises:
            CannotGenerate: there is nothing to begin with.
            ChatTemplateMissing, TemplateRefuses: of messages.
        """
        if isinstance(text, str):
            ids = text_ids(text, self.tokenizer, add_bos=self.chat_keys.add_bos)
        else:
            ids = prompt_ids(text, self.tokenizer, self.chat_keys, place=place)
        if self.tokenizer.bos_id is not None and not ids:
            ids = [self.tokenizer.bos_id]
        if not ids:
            raise CannotGenerate(reason="the prompt is empty and the tokenizer has no begin-of-sequence token")
        if len(ids) > self.window:
            _log.warning("the prompt has %d tokens; the model sees the last %d alone", len(ids), self.window)
        return ids


def load_model(
    uri: str,
    *,
    base: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
    window: int | None = None,
) -> LoadedModel:
    """Return the model that an address names.

    Args:
        uri: the directory of a run or the address of its checkpoints, of which the newest good one is taken; one of
            these; a directory of another program, such as Hugging Face's; or an adapter in a directory of peft.
        base: address of the weights below an adapter, where they are not where the adapter or its run took them.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that is found.
        trusted: files of public keys, one of which must have signed what is loaded; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.
        window: tokens that it sees at once; None: as many as it has positions.

    Raises:
        SequenceTooLongForModel: it has fewer positions than ``window``.
        SavedConfigUnusable: the model cannot be built here, or needs what a checkpoint may not decide.
        CheckpointNotTrusted: what is loaded lacks a valid signature of one of the keys.
        CannotGenerate: the run has no tokenizer.
        VocabularyTooSmall: the tokenizer has ids that the model has no row for.
        AdapterOfAnotherBase: the weights below are others than the run's.
        NxdtError: what is wrong with the checkpoint or the directory.
    """
    found = find_weights(uri, base=base, config=config, trusted=trusted)
    tokenizer = build.tokenizer(found.run, build.model_builder(found.run).vocab_size)
    if tokenizer is None:
        raise CannotGenerate(reason="its run names no tokenizer")
    if getattr(found.run.selected("model").config, "score_head", False):
        raise CannotGenerate(reason="its model gives scores (model.score_head)")
    longest = build.window(found.run)
    if window is not None and window > longest:
        raise SequenceTooLongForModel(sequence=window, longest=longest)
    engine = build.engine(found.run)
    engine.start()
    model = initialize_parallel_model(found.run, engine, materialise=False)
    found.load(engine, model)
    return LoadedModel(
        config=found.run,
        model=model,
        tokenizer=tokenizer,
        chat_keys=found.chat_keys,
        step=found.step,
        window=window or longest,
        source=found.source,
    )


def prompts_in(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the record of each prompt in a file: lines of text, or records that have a text ``prompt`` or
    a list ``messages``.

    Raises:
        PromptMissing: a record has neither.
        NxdtError: as of :func:`~nxdt_core.data.files.records.read_records`.
    """
    if path.suffix == ".txt":
        lines = decode(path, read_bytes(path)).replace("\r\n", "\n").split("\n")  # splitlines cuts at U+2028, too
        yield from ((f"{path}:{number}", {"prompt": line}) for number, line in enumerate(lines, 1) if line)
        return
    records, _ = read_records([path], "--prompts", example='{"prompt": "..."}')
    for place, record in records:
        if not isinstance(record.get("prompt"), str) and not isinstance(record.get("messages"), list):
            raise PromptMissing(place=str(place))
        yield str(place), record


def generate(
    uri: str,
    prompt: str,
    *,
    chat: bool = False,
    base: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
    max_new_tokens: int = 100,
    **sampling: Any,
) -> Iterator[str]:
    """Yield the continuation of ``prompt`` piece by piece.

    Args:
        uri: as of :func:`~nxdt_core.train.generate.load_model`.
        prompt: may be empty where the tokenizer has a begin-of-sequence token.
        chat: the prompt is a user's turn, and what is yielded the answer, by the run's chat template.
        base: as of ``load_model``.
        config: as of it, too.
        trusted: as of it, too.
        max_new_tokens: end, where the model does not end by itself.
        sampling: other fields of :class:`~nxdt_core.train.sampling.Sampling`, such as ``temperature``.

    Raises:
        CannotGenerate: the run has no tokenizer, or there is nothing to begin with.
        ChatTemplateMissing, TemplateRefuses: of ``chat``.
    """
    found = load_model(uri, base=base, config=config, trusted=trusted)
    ids = found.prompt([{"role": "user", "content": prompt}] if chat else prompt)
    yield from found.writer.pieces(ids, Sampling(max_new_tokens=max_new_tokens, **sampling))
