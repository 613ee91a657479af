"""From the logits of the next token to a token, greedy or sampled. Settings mean what they mean in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nxdt_core.distributed.devices import HOST

__all__ = ["Sampler", "Sampling", "warped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and how many."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0 takes the likeliest token; higher is more random."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens whose probabilities add up to this share."""
    min_p: float | None = None
    """Draw among tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that occurred, multiply negative ones (Keskar et al. 2019, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit, for each time that it was generated."""
    stop: tuple[str, ...] = ()
    """Texts that end what is generated, and are not part of it."""
    samples: int = 1
    """Continuations of each prompt."""
    seed: int | Sequence[int] = 0
    """Seed of the first sample's draws, of which each further sample of this and of later prompts has the next; or
    that of the first sample of each prompt."""

    def seeds(self, prompts: int) -> Sequence[int]:
        """Return the seed of the first sample of each prompt."""
        if not isinstance(self.seed, int):
            return self.seed
        return range(self.seed, self.seed + prompts * self.samples, self.samples)


class Sampler:
    """Chooses the next token of each row; a row's draws do not depend on the other rows."""

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
        """
        Args:
            sampling: see there.
            prompts: of which each is ``sampling.samples`` adjacent rows.
            vocab_size: of the tokenizer; rows of the model beyond it are never chosen.
        """
        rows = [prompt for prompt in prompts for _ in range(sampling.samples)]
        self._sampling, self._vocab_size = sampling, vocab_size
        seeds = [first + number for first in sampling.seeds(len(prompts)) for number in range(sampling.samples)]
        self._draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._occurred = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        self._generated = torch.zeros(len(rows), vocab_size, dtype=torch.int32)
        for row, ids in enumerate(rows) if sampling.repetition_penalty != 1 else ():
            self._occurred[row, [id_ for id_ in ids if id_ < vocab_size]] = True

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """Return a token for each row of ``logits`` [rows, vocab]."""
        logits = logits[:, : self._vocab_size].float()
        sampling = self._sampling
        penalised = sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0
        if penalised or sampling.temperature > 0:
            logits = logits.to(HOST)
        if penalised:
            logits = self._penalised(logits)
        if sampling.temperature <= 0:
            tokens: list[int] = logits.argmax(-1).tolist()
        else:
            sums = warped(logits, sampling).exp_().cumsum(-1)
            # One number per row, not one per token of the vocabulary as torch.multinomial draws: 16 times as fast.
            shares = [torch.rand(1, dtype=torch.float64, generator=draw) for draw in self._draws]
            places = torch.searchsorted(sums, torch.stack(shares) * sums[:, -1:], right=True)
            tokens = places.clamp_(max=sums.shape[-1] - 1).flatten().tolist()
        if penalised:
            at = range(len(tokens)), tokens
            self._occurred[at] = True
            self._generated[at] += 1
        return tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only."""
        self._draws = [self._draws[row] for row in rows]
        self._occurred, self._generated = self._occurred[rows], self._generated[rows]

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        penalty = self._sampling.repetition_penalty
        logits = torch.where(self._occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        return logits - self._sampling.frequency_penalty * self._generated


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the logarithms of the weights, float64, with which tokens of ``logits`` [rows, vocab] are drawn.

    A token's weight is at most 1, so that no temperature makes it overflow.
    """
    weights = (logits - logits.amax(-1, keepdim=True)).double() / sampling.temperature
    if sampling.top_k is not None:
        floor = weights.topk(min(sampling.top_k, weights.shape[-1])).values[:, -1:]
        weights = weights.masked_fill(weights < floor, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = weights.sort(descending=True)
        chances = ordered.softmax(-1)
        likelier = chances.cumsum(-1) - chances  # the sum of those before
        hidden = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, likelier >= sampling.top_p)
        weights = weights.masked_fill(hidden, float("-inf"))
    if sampling.min_p is not None:
        weights = weights.masked_fill(weights.exp() < sampling.min_p, float("-inf"))
    return weights
