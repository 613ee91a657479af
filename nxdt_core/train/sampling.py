"""From the logits of the next token to a token, greedy or sampled. Settings mean what they mean in transformers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from nxdt_core.distributed.devices import HOST

__all__ = ["Sampler", "Sampling", "warped"]

_BLOCK = 16
"""Columns of tokens for which the host does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings that choose tokens, and limit their number."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """Sampling temperature: 0 takes the likeliest token; higher is more random."""
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
    """Chooses the next token of each row; a row's draws do not depend on the other rows.

    A :class:`nxdt_core.protocols.parallel_model.TokenChoice`. Random numbers come from the host on every device.
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device = HOST
    ) -> None:
        """
        Args:
            sampling: see there.
            prompts: of which each is ``sampling.samples`` adjacent rows.
            vocab_size: of the tokenizer; rows of the model beyond it are never chosen.
            device: where tokens are chosen; on the host logits may be elsewhere.
        """
        rows = [prompt for prompt in prompts for _ in range(sampling.samples)]
        self._sampling, self._vocab_size = sampling, vocab_size
        self._greedy = sampling.temperature <= 0
        self._penalises = sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0
        seeds = [first + number for first in sampling.seeds(len(prompts)) for number in range(sampling.samples)]
        self._draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        width = vocab_size if self._penalises else 0
        occurred = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, ids in enumerate(rows) if sampling.repetition_penalty != 1 else ():
            occurred[row, [id_ for id_ in ids if id_ < vocab_size]] = True

        def zeros(width: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(len(rows), width, dtype=dtype, device=device)

        self.state = {
            "tokens": zeros(1),
            "column": zeros(1),
            "written": zeros(_BLOCK),
            "shares": zeros(_BLOCK, torch.float64),
            "occurred": occurred.to(device),
            "generated": zeros(width, torch.int32),
        }

    @property
    def key(self) -> Hashable:
        """The settings that :meth:`choose` reads, and the number of tokens among which it chooses."""
        return replace(self._sampling, max_new_tokens=0, stop=(), samples=1, seed=0), self._vocab_size

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """Return a token for each row of ``logits`` [rows, vocab]."""
        self.begin(1)
        tokens: list[int] = self.state["tokens"].copy_(self._chosen(logits)).flatten().tolist()
        return tokens

    def begin(self, columns: int) -> int:
        """Draw the random numbers of the next columns, at most 16, and return of how many."""
        columns = min(columns, _BLOCK)
        self.state["column"].zero_()
        if columns > 0 and not self._greedy:
            # One number per row, not one per token of the vocabulary as torch.multinomial draws: 16 times as fast.
            shares = [torch.rand(columns, dtype=torch.float64, generator=draw) for draw in self._draws]
            self.state["shares"][:, :columns] = torch.stack(shares)
        return columns

    def choose(self, logits: torch.Tensor) -> None:
        """Choose a token for each row of ``logits`` [rows, vocab]."""
        tokens = self.state["tokens"].copy_(self._chosen(logits))
        self.state["written"].scatter_(1, self.state["column"], tokens)
        self.state["column"].add_(1)

    def written(self, columns: int) -> list[list[int]]:
        """Return the columns of tokens that were chosen since :meth:`begin`."""
        tokens: list[list[int]] = self.state["written"][:, :columns].t().tolist()
        return tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only."""
        self._draws = [self._draws[row] for row in rows]
        index = torch.tensor(rows)
        self.state = {name: value[index.to(value.device)] for name, value in self.state.items()}

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """The tokens [rows, 1], which have occurred from now on."""
        state, logits = self.state, logits[:, : self._vocab_size].float()
        if self._penalises or not self._greedy:
            logits = logits.to(state["tokens"].device)
        if self._penalises:
            logits = self._penalised(logits)
        if self._greedy:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            sums = warped(logits, self._sampling).exp_().cumsum(-1)
            shares = state["shares"].gather(1, state["column"])
            tokens = torch.searchsorted(sums, shares * sums[:, -1:], right=True).clamp_(max=sums.shape[-1] - 1)
        if self._penalises:
            state["occurred"].scatter_(1, tokens, True)
            state["generated"].scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.int32))
        return tokens

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        penalty, occurred = self._sampling.repetition_penalty, self.state["occurred"]
        logits = torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        return logits - self._sampling.frequency_penalty * self.state["generated"]


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
