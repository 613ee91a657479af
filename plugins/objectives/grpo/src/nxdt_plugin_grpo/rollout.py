"""Answers to prompts, as the model draws them, with their rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train.continuation import Writer
from nxdt_core.train.sampling import Sampling
from nxdt_core.train.session import TrainSession
from nxdt_plugin_grpo.prompts import Prompt


@dataclass(kw_only=True)
class Group:
    """The answers to a prompt; of a blank sample there are none. All fields are JSON-able."""

    prompt: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each, with the one that ends it."""
    ended: list[bool] = field(default_factory=list)
    """Whether an answer ends, and was not cut off."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By name, of each answer, before they are weighted."""
    old_log_probs: list[list[float]] = field(default_factory=list)
    """Of the answers' tokens before the first step on them; empty where there is one step."""

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Return the answers without the token that ends them."""
        answers = zip(self.answers, self.ended, strict=True)
        return [tokenizer.decode(answer[:-1] if ended else answer) for answer, ended in answers]


def answers_to(
    prompts: Sequence[Prompt],
    writer: Writer,
    stops: Collection[int],
    *,
    count: int,
    longest: int,
    drawn: Sequence[tuple[int, ...]],
    in_step: bool,
) -> list[Group]:
    """Draw answers to each of ``prompts``, without rewards. Collective over the ranks that share the model.

    Args:
        prompts: what is asked.
        writer: of the model; it ends no answer itself.
        stops: tokens that end an answer.
        count: answers to each prompt.
        longest: tokens of an answer at most.
        drawn: what the random numbers of each prompt depend on.
        in_step: always take ``longest`` passes, since other ranks with other prompts take part in each.
    """
    answers: list[list[int]] = [[] for _ in range(count * len(prompts))]
    ended: set[int] = set()
    done: set[int] = set()
    seeds = tuple(
        int.from_bytes(hashlib.blake2b(repr(each).encode(), digest_size=7).digest(), "little") for each in drawn
    )
    sampling = Sampling(max_new_tokens=longest, temperature=1.0, samples=count, seed=seeds)
    for row, token in writer.tokens([prompt.ids for prompt in prompts], sampling, ended):
        if row not in done:
            answers[row].append(token)
        if token in stops:
            done.add(row)
            if not in_step:
                ended.add(row)
    return [
        Group(
            prompt=list(prompt.ids),
            answers=answers[first : first + count],
            ended=[row in done for row in range(first, first + count)],
        )
        for first, prompt in zip(range(0, len(answers), count), prompts, strict=True)
    ]


def places(session: TrainSession, micro_batches: Sequence[Batch]) -> Iterator[int]:
    """Yield the place in the global batch of each sample of this rank's micro-batches; ranks have equally many."""
    samples = sum(batch.samples for batch in micro_batches)
    first = session.engine.rank_info.dp_rank * samples
    return iter(range(first, first + samples))
