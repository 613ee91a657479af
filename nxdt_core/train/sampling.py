"""From the logits of the next token to a token, greedy or sampled, as settings of transformers say; and the loop that
continues prompts: rows of a batch get a token each per pass of the model, until they have ended.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.parallel_model import CacheUnsupported, Decoding, ParallelModel
from nxdt_core.protocols.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_BLOCK = 16
"""Columns of tokens for which the host does not wait."""
_ASKED = 16
"""Passes after which ranks compare whether their answers have ended."""


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
            penalty = self._sampling.repetition_penalty
            lower = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(state["occurred"], lower, logits)
            logits = logits - self._sampling.frequency_penalty * state["generated"]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A model, and what it needs to write text."""

    model: ParallelModel
    """Equal logits on all its ranks give equal tokens on all."""
    tokenizer: Tokenizer
    window: int
    """Tokens that the model sees at once: the last ones of a longer text."""
    stop_ids: Collection[int]
    """Each ends a text, and is not part of it."""

    def tokens(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, ended: AbstractSet[int] = frozenset()
    ) -> Iterator[tuple[int, int]]:
        """Yield (row, token) for each token that is written; a prompt is ``sampling.samples`` adjacent rows.

        Args:
            prompts: tokens, of each at least one.
            sampling: its stop texts are the caller's to find.
            ended: rows that get no further token; the caller adds to it.
        """
        with self.model.writing():
            seen, passes = [[*prompt] for prompt in prompts], _Passes(self, prompts, sampling.max_new_tokens)
            sampler = Sampler(sampling, prompts, self.tokenizer.vocab_size, passes.device)
            logits = passes(seen)
            rows, left = [*range(len(prompts) * sampling.samples)], sampling.max_new_tokens
            if sampling.samples > 1:
                of_prompt = [row // sampling.samples for row in rows]
                seen, logits = [[*seen[prompt]] for prompt in of_prompt], logits[of_prompt]
                passes.keep(of_prompt)
            if not left:
                return
            going = [*rows]
            """Places in ``rows`` of those that continue."""

            def within_window() -> int:
                return min(left, self.window + 1 - max(len(seen[place]) for place in going))

            def columns() -> Iterator[list[int]]:
                nonlocal rows, seen, going
                yield sampler(logits)
                while True:
                    yield from passes.columns(sampler, within_window)
                    if len(going) < len(rows):
                        rows, seen = [rows[place] for place in going], [seen[place] for place in going]
                        passes.keep(going)
                        sampler.keep(going)
                        going = [*range(len(rows))]
                    yield sampler(passes(seen))

            for tokens in columns():
                left, places, going = left - 1, going, []
                for place in places:
                    if (token := tokens[place]) not in self.stop_ids:
                        seen[place].append(token)
                        yield rows[place], token
                        if rows[place] not in ended:
                            going.append(place)
                if not left or not going:
                    return

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        stops: Collection[int],
        sampling: Sampling,
        *,
        drawn: Sequence[tuple[int, ...]],
        any_left: Callable[[bool], bool] | None = None,
    ) -> list[tuple[list[int], bool]]:
        """Draw answers. Collective over the ranks that share the model.

        Args:
            prompts: tokens, of each at least one.
            stops: tokens that end an answer and are part of it; the writer itself ends none.
            sampling: how they are drawn, without the seed. Tokens of its stop texts are part of an answer.
            drawn: what the random numbers of each prompt depend on.
            any_left: where ranks with other prompts take part in each pass: from whether an answer of this rank
                continues to whether one of any rank does. Collective; all ranks then take equally many passes.

        Returns:
            The tokens of each answer, and whether it ended and was not cut off; those to one prompt are adjacent.
        """
        answers: list[list[int]] = [[] for _ in range(sampling.samples * len(prompts))]
        watched = [prompt for prompt in prompts for _ in range(sampling.samples)] if sampling.stop else []
        texts = [_Text(self.tokenizer, prompt, sampling.stop) for prompt in watched]
        ended, done = set[int](), set[int]()
        digests = (hashlib.blake2b(repr(parts).encode(), digest_size=7).digest() for parts in drawn)
        seeds = tuple(int.from_bytes(digest, "little") for digest in digests)
        for number, (row, token) in enumerate(self.tokens(prompts, replace(sampling, seed=seeds), ended)):
            if any_left and number % (_ASKED * len(answers)) == 0 and not any_left(len(done) < len(answers)):
                ended.update(range(len(answers)))
            if row not in done:
                answers[row].append(token)
                if texts:
                    texts[row].add(token)
            if token in stops or (texts and texts[row].ended):
                done.add(row)
                if any_left is None:
                    ended.add(row)
        return [(answer, row in done) for row, answer in enumerate(answers)]

    def pieces(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        """Yield the continuation of one prompt piece by piece, up to a stop text."""
        text, ended = _Text(self.tokenizer, prompt, sampling.stop), set[int]()
        for _, token in self.tokens([prompt], sampling, ended):
            if piece := text.add(token):
                yield piece
            if text.ended:
                ended.add(0)
        if piece := text.add(None):
            yield piece

    def texts(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, batch: int = 1) -> Iterator[list[str]]:
        """Yield the continuations of each prompt, ``sampling.samples`` texts, in order; ``batch`` prompts at a time."""
        seeds, count = sampling.seeds(len(prompts)), sampling.samples
        for first in range(0, len(prompts), batch):
            together = prompts[first : first + batch]
            texts = [_Text(self.tokenizer, prompt, sampling.stop) for prompt in together for _ in range(count)]
            ended = set[int]()
            for row, token in self.tokens(together, replace(sampling, seed=seeds[first : first + batch]), ended):
                texts[row].add(token)
                if texts[row].ended:
                    ended.add(row)
            for text in texts:
                text.add(None)
            for number in range(0, len(texts), count):
                yield [text.certain for text in texts[number : number + count]]


def completion(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """Return the text that ``ids`` add to that of ``prompt``, as :class:`Writer` gives it, before the first stop."""
    text = _Text(tokenizer, prompt, stops)
    for token in (*ids, None):
        text.add(token)
        if text.ended:
            break
    return text.certain


class _Passes:
    """The model's passes: over the new tokens where it keeps keys and values, else over all that it sees."""

    def __init__(self, writer: Writer, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._model, self._window = writer.model, writer.window
        self._begun = False
        self._decoding: Decoding | None = None
        self.device = HOST
        """Device on which tokens are chosen."""
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) <= self._window:
            # The shortest row may become as long as the window, behind its padding.
            columns = min(max(lengths) + new_tokens, self._window + max(lengths) - min(lengths))
            try:
                self._decoding = self._model.decoding(lengths, columns)
                self.device = self._decoding.device or HOST
            except CacheUnsupported as error:
                _tell("each token computes all earlier ones again: %s", str(error))

    def __call__(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits [rows, vocab] of the token that follows each of ``rows``."""
        longest = max(map(len, rows))
        if longest > self._window:
            _tell(
                "a text is longer than the model's window: each further token computes the last %d again", self._window
            )
            self._decoding = None
        if self._decoding is None:
            windows = (torch.tensor([row[-self._window :]]) for row in rows)
            return torch.stack([self._model.forward(ids)[0, -1] for ids in windows])
        if self._begun:
            return self._decoding(torch.tensor([row[-1:] for row in rows]))
        self._begun = True
        return self._decoding(torch.tensor([[0] * (longest - len(row)) + [*row] for row in rows]))

    def columns(self, sampler: Sampler, left: Callable[[], int]) -> Iterator[list[int]]:
        """Yield the next columns of tokens, ``left()`` of them, as far as the model writes several at a time."""
        if self._decoding is not None:
            for block in self._decoding.blocks(sampler, left, self._window):
                yield from block

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only."""
        if self._decoding is not None:
            self._decoding.keep(rows)


@functools.cache
def _tell(line: str, value: object) -> None:
    """Log a warning once."""
    _log.warning(line, value)


class _Text:
    """The text of a row as its tokens arrive: what they add to the decoded prompt.

    Tokens are decoded together with earlier ones, on which depends what they spell: SentencePiece's decoders strip the
    space before the first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = [*prompt]
        self._first, self._next = 0, len(prompt)
        """Numbers of the first token that is decoded again, and of the first whose text is not certain."""
        self._known = tokenizer.decode(prompt)
        """Text of the tokens between these two."""
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.certain = ""
        self.ended = False
        """True once a stop text follows."""

    def add(self, token: int | None) -> str:
        """Return the text that is certain now; ``None`` ends the row. A character of several tokens is there once it is
        whole."""
        if token is not None:
            self._ids.append(token)
        text, alone = (self._tokenizer.decode(self._ids[first:]) for first in (self._first, self._next))
        # Bytes that are no UTF-8 may change the text before them.
        piece = text[len(self._known) :] if text.startswith(self._known) else alone
        if token is not None and piece.endswith("\ufffd"):
            return ""
        if alone:
            self._first, self._known = self._next, alone
        else:  # special tokens, or a space that is stripped at the beginning
            self._known = text
        self._next = len(self._ids)
        piece = self._held + piece
        places = [place for stop in self._stops if (place := piece.find(stop)) >= 0]
        self.ended = bool(places)
        certain = min(places, default=len(piece))
        piece = piece[:certain]
        if not self.ended and token is not None:  # a stop text may begin with the last characters
            beginnings = (stop[:length] for stop in self._stops for length in range(1, len(stop)))
            certain -= max((len(text) for text in beginnings if piece.endswith(text)), default=0)
        self._held = piece[certain:]
        self.certain += piece[:certain]
        return piece[:certain]
