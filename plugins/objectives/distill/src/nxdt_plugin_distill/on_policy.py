"""Answers of the model that learns to the prompts of the data, in place of the answers that the data has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.train.sampling import Sampling, Writer
from nxdt_plugin_distill.config import DistillConfig
from nxdt_plugin_distill.errors import NoPrompts, PromptTooLong

if TYPE_CHECKING:
    from nxdt_core.train import TrainSession


def is_drawn(step: int, *, seed: int, share: float) -> bool:
    """Return whether a step is one of the ``share`` that take drawn answers: the same on all ranks and in every run."""
    drawn = hashlib.blake2b(repr(("on-policy", seed, step)).encode(), digest_size=7).digest()
    return int.from_bytes(drawn, "little") < share * (1 << 56)


def answered(session: TrainSession, micro_batches: Sequence[Batch], config: DistillConfig) -> list[Batch]:
    """Return micro-batches of the same shape whose rows have the prompts of these, and answers of the model.
    Collective.

    Raises:
        NoPrompts: a row does not begin with a prompt, or has several.
        PromptTooLong: one leaves no room for an answer.
    """
    tokenizer, window = session.data.tokenizer, session.config.run.data.seq_length
    if tokenizer is None:
        raise NoPrompts(share=config.on_policy, reason="the data has no tokenizer")
    writer = Writer(model=session.model, tokenizer=tokenizer, window=window, stop_ids=frozenset())
    stops, longest = session.stop_ids, config.max_completion_length
    sampling = Sampling(max_new_tokens=longest, temperature=1.0)
    any_left = session.engine.ranks.any_rank if session.engine.rank_info.dp_size > 1 else None
    place = session.engine.rank_info.dp_rank * sum(len(batch.input_ids) for batch in micro_batches)
    found = []
    for batch in micro_batches:
        prompts = [_prompt(batch, row, config) for row in range(len(batch.input_ids))]
        for prompt in prompts:
            if len(prompt) + longest > window:
                raise PromptTooLong(tokens=len(prompt), most=longest, window=window)
        drawn = [(session.config.run.seed, session.state.step, place + row) for row in range(len(prompts))]
        answers = writer.answers(prompts, stops, sampling, drawn=drawn, any_left=any_left)
        found.append(_written(batch, prompts, [answer for answer, _ in answers]))
        place += len(prompts)
    return found


def _prompt(batch: Batch, row: int, config: DistillConfig) -> list[int]:
    """Return the tokens of a row before the first one with a loss; one of a row without a loss."""
    if batch.document_ids is not None and int(batch.document_ids[row].max()) > 0:
        raise NoPrompts(share=config.on_policy, reason="a sequence of the data has several conversations")
    trained = (batch.labels[row] != IGNORE_INDEX).nonzero()
    last = int(trained[0]) if len(trained) else 0
    if len(trained) and not last:
        raise NoPrompts(share=config.on_policy, reason="a sequence of the data has a loss from its beginning")
    prompt: list[int] = batch.input_ids[row, : last + 1].tolist()
    return prompt


def _written(batch: Batch, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    ids, labels = torch.zeros_like(batch.input_ids), torch.full_like(batch.labels, IGNORE_INDEX)
    padding = torch.ones_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole, last = torch.tensor([*prompt, *answer]), len(prompt) - 1
        ids[row, : len(whole)] = whole
        if bool((batch.labels[row] != IGNORE_INDEX).any()):  # else it is a blank row
            labels[row, last : last + len(answer)] = whole[last + 1 :]
            padding[row, : len(whole)] = False
    return Batch(input_ids=ids, labels=labels, padding=padding)
