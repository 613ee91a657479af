"""Answers to prompts, as the model draws them, with their rewards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import TrainSession
from nxdt_core.train.sampling import completion
from nxdt_plugin_grpo.rewards import Answer


@dataclass(kw_only=True)
class Group:
    """The answers to a prompt; of a blank sample there are none. All fields are JSON-able."""

    prompt: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each, with the one that ends it."""
    ended: list[bool] = field(default_factory=list)
    """True for each answer that ends by itself, and was not cut off."""
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    """Scores by name, of each answer, before they are weighted; None: it has no score."""
    old_log_probs: list[list[float]] = field(default_factory=list)
    """Log-probabilities of the answers' tokens before the first step on them; empty where there is one step."""

    def texts(self, tokenizer: Tokenizer, ends: Collection[int], stops: Sequence[str]) -> list[Answer]:
        """Return the answers without what ends them: a token of ``ends``, or one of the texts ``stops``."""
        return [
            Answer.of(completion(tokenizer, self.prompt, ids[:-1] if ids and ids[-1] in ends else ids, stops), ids)
            for ids in self.answers
        ]


def places(session: TrainSession, micro_batches: Sequence[Batch]) -> Iterator[int]:
    """Yield the place in the global batch of each sample of this rank's micro-batches; ranks have equally many."""
    samples = sum(batch.samples for batch in micro_batches)
    first = session.engine.rank_info.dp_rank * samples
    return iter(range(first, first + samples))
