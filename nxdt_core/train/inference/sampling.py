"""What a model writes behind some tokens. Greedy or sampled; no cache, so meant for small models and few tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.parallel.model import ParallelModel

__all__ = ["Sampling", "continue_ids"]


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
