"""Text from a checkpoint, to see what a model learned. Greedy or sampled; no cache, so meant for small models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from nxdt_core.data.chat.rendering import prompt_ids
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.train.inference.load import load_model
from nxdt_core.train.inference.sampling import Sampling

__all__ = ["generate"]

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
