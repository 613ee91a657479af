"""Answers to prompts, as the model draws them, with their rewards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train.continuation import Writer, completion
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
        return [completion(tokenizer, self.prompt, answer[:-1] if ended else answer) for answer, ended in answers]


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
    """Draw answers to each of ``prompts``, without rewards. Collective over the ranks that share the model. Arguments
    are those of :meth:`~nxdt_core.train.continuation.Writer.answers`.
    """
    ids = [prompt.ids for prompt in prompts]
    found = iter(writer.answers(ids, stops, longest=longest, drawn=drawn, in_step=in_step, count=count))
    groups = []
    for prompt in prompts:
        answers, ended = zip(*islice(found, count), strict=True)
        groups.append(Group(prompt=list(prompt.ids), answers=[*answers], ended=[*ended]))
    return groups


def places(session: TrainSession, micro_batches: Sequence[Batch]) -> Iterator[int]:
    """Yield the place in the global batch of each sample of this rank's micro-batches; ranks have equally many."""
    samples = sum(batch.samples for batch in micro_batches)
    first = session.engine.rank_info.dp_rank * samples
    return iter(range(first, first + samples))
