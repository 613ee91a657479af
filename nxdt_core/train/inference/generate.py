"""Text from a checkpoint, to see what a model learned. Greedy or sampled; no cache, so meant for small models."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from nxdt_core.data.chat.rendering import prompt_ids
from nxdt_core.data.tokens import text_ids
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.train.inference.load import load_model

__all__ = ["Sampling", "continue_ids", "generate"]


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
        base: as of :func:`~nxdt_core.train.inference.load.load_model`.
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
