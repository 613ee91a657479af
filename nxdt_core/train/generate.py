"""Trained models: loading one from a checkpoint with the tokenizer of its run, and generating text, greedy or sampled.

There is no cache of keys and values, so this is meant for small models and few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint.hf.source import HFSource
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.chat.rendering import prompt_ids, stop_ids
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.data.tokens import text_ids
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.base import base_digest, base_weights, load_weights
from nxdt_core.train.weights.saved_config import locate, named_config, saved_run

__all__ = ["LoadedModel", "Sampling", "continue_ids", "generate", "load_model"]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with a checkpoint's weights."""

    config: ResolvedConfig
    """Of the run that wrote them."""
    model: ParallelModel
    tokenizer: Tokenizer
    chat_keys: ChatKeys
    """How the run's data made text of messages."""
    step: int
    """Optimizer steps that the weights have seen."""
    source: HFSource | None = None
    """The Hugging Face directory that the weights came from; None: they came from elsewhere."""

    @property
    def window(self) -> int:
        """Tokens that it sees at once."""
        return self.config.run.data.seq_length

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens of :func:`~nxdt_core.data.chat.rendering.stop_ids`, and those that the weights' source names."""
        theirs = () if self.source is None else self.source.stops_of(self.tokenizer)
        return tuple(dict.fromkeys((*stop_ids(self.chat_keys, self.tokenizer), *theirs)))

    def continuation(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yield the tokens that it writes behind ``ids``, until it ends the text or its turn."""
        vocab_size = self.tokenizer.vocab_size
        return continue_ids(
            self.model, ids, sampling, window=self.window, vocab_size=vocab_size, stop_ids=self.stop_ids
        )


def load_model(
    uri: str, *, base: str | None = None, config: str | None = None, trusted: Sequence[str] = ()
) -> LoadedModel:
    """Return the model of a checkpoint, or of the newest good one of a run's.

    Args:
        uri: its address.
        base: address of the weights below an adapter, where the checkpoint leaves them out and they are not where its
            run took them.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that the checkpoint keeps.
        trusted: files of public keys, one of which must have signed what is loaded; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.

    Raises:
        SavedConfigUnusable: the model cannot be built here, or needs what a checkpoint may not decide.
        CheckpointNotTrusted: what is loaded lacks a valid signature of one of the keys.
        CannotGenerate: the run has no tokenizer.
        AdapterOfAnotherBase: the weights below are others than the run's.
        NxdtError: what is wrong with the checkpoint.
    """
    own, keys = named_config(config, trusted)
    found, step = locate(uri, own)
    manifest = checkpoint.find_checkpoint(found, step, warn=_log.warning, trusted=keys)
    saved = saved_run(manifest, where=build.step_uri(found, manifest.step), config=own, base=base is None)
    run = saved.config
    tokenizer = build.tokenizer(run)
    if tokenizer is None:
        raise CannotGenerate(reason="its run names no tokenizer")
    engine = build.engine(run)
    engine.start()
    model = initialize_parallel_model(run, engine, materialise=False)
    if manifest.facts.without_base:
        below = base_weights(run, found, manifest, base=base, trusted=keys)
        for name, weight in zip(below.specs, below.read([*below.specs]), strict=True):
            model.load_state_dict({name: weight}, strict=False)
        if base_digest(model, engine.ranks) != manifest.facts.base:
            raise AdapterOfAnotherBase(where=build.step_uri(found, manifest.step), base=below.origin)
    load_weights(found, manifest, engine=engine, model=model)
    return LoadedModel(
        config=run,
        model=model,
        tokenizer=tokenizer,
        chat_keys=saved.chat_keys,
        step=manifest.step,
        source=HFSource.of_facts(manifest.facts.hf),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and how many."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0 takes the likeliest token; higher is more random."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    seed: int = 0


def continue_ids(
    model: ParallelModel,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    window: int,
    vocab_size: int,
    stop_ids: Collection[int],
) -> Iterator[int]:
    """Yield token after token behind ``ids``.

    Args:
        model: equal logits on all its ranks give equal tokens on all.
        ids: at least one; the model sees the last ``window``.
        sampling: see there.
        window: longest sequence of the model.
        vocab_size: of the tokenizer; rows of the model beyond it are never chosen.
        stop_ids: each ends the text and is not yielded.
    """
    draws = torch.Generator().manual_seed(sampling.seed)
    seen = list(ids)
    for _ in range(sampling.max_new_tokens):
        logits = model.forward(torch.tensor([seen[-window:]]))[0, -1].float().to(HOST)[:vocab_size]
        token = _pick(logits, sampling.temperature, sampling.top_k, draws)
        if token in stop_ids:
            return
        seen.append(token)
        yield token


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> int:
    """One token of ``logits`` [vocab]."""
    if temperature <= 0:
        return int(logits.argmax())
    if top_k is not None:
        floor = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    shifted = (logits - logits.max()).double() / temperature  # at most 0: no temperature makes it overflow upwards
    return int(torch.multinomial(shifted.softmax(0), 1, generator=draws))


_log = logging.getLogger(__name__)


def generate(
    uri: str,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    base: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the continuation of ``prompt`` piece by piece.

    Args:
        uri: a checkpoint, or the root of a run's checkpoints (the newest good one is taken).
        prompt: may be empty where the tokenizer has a begin-of-sequence token.
        chat: the prompt is a user's turn, and what is yielded the answer, by the run's chat template.
        max_new_tokens: end, where the model does not end by itself.
        temperature: 0 takes the likeliest token; higher is more random.
        top_k: draw among this many likeliest tokens only.
        seed: of the draws.
        base: as of :func:`~nxdt_core.train.generate.load_model`.
        config: as of it, too.
        trusted: as of it, too.

    Raises:
        CannotGenerate: the run has no tokenizer, or there is nothing to begin with.
        ChatTemplateMissing, TemplateRefuses: of ``chat``.
    """
    found = load_model(uri, base=base, config=config, trusted=trusted)
    tokenizer = found.tokenizer
    if chat:
        asked = [{"role": "user", "content": prompt}]
        ids = prompt_ids(asked, tokenizer, found.chat_keys, place="The prompt")
    else:
        ids = text_ids(prompt, tokenizer)
    if tokenizer.bos_id is not None and not ids:
        ids = [tokenizer.bos_id]
    if not ids:
        raise CannotGenerate(reason="the prompt is empty and the tokenizer has no begin-of-sequence token")
    if len(ids) > found.window:
        _log.warning("the prompt has %d tokens; the model sees the last %d alone", len(ids), found.window)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    written, shown = [], ""
    for token in found.continuation(ids, sampling):
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # a character of several tokens is shown once it is whole
            yield text[len(shown) :]
            shown = text
