"""Text from a checkpoint, to see what a model learned. Greedy or sampled; no cache, so meant for small models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import cast

import torch

from nxdt_core import checkpoint
from nxdt_core.config import ResolvedConfig
from nxdt_core.devices import HOST
from nxdt_core.errors import CannotGenerate
from nxdt_core.kernel import Kernel
from nxdt_core.parallel.model import TorchModel
from nxdt_core.training import assemble, primitives
from nxdt_core.training.base_weights import base_weights
from nxdt_core.training.saved_config import saved_config

__all__ = ["generate"]

_log = logging.getLogger(__name__)


def generate(
    uri: str,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the continuation of ``prompt`` piece by piece.

    Args:
        uri: a checkpoint, or the root of a run's checkpoints (the newest good one is taken).
        prompt: may be empty where the tokenizer has a begin-of-sequence token.
        max_new_tokens: end, where the model does not end by itself.
        temperature: 0 takes the likeliest token; higher is more random.
        top_k: draw among this many likeliest tokens only.
        seed: of the draws.

    Raises:
        CannotGenerate: the run has no tokenizer, or there is nothing to begin with.
    """
    config, model = _load(uri)
    tokenizer = assemble.tokenizer(config)
    if tokenizer is None:
        raise CannotGenerate(reason="its run names no tokenizer")
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None and not ids:
        ids = [tokenizer.bos_id]
    if not ids:
        raise CannotGenerate(reason="the prompt is empty and the tokenizer has no begin-of-sequence token")
    draws = torch.Generator().manual_seed(seed)
    begun, shown = len(ids), ""
    for _ in range(max_new_tokens):
        window = torch.tensor([ids[-config.run.data.seq_length :]])
        logits = model.forward(window)[0, -1].float().to(HOST)[: tokenizer.vocab_size]
        token = _pick(logits, temperature, top_k, draws)
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        text = tokenizer.decode(ids[begun:])
        if not text.endswith("\ufffd"):  # a character of several tokens is shown once it is whole
            yield text[len(shown) :]
            shown = text


def _load(uri: str) -> tuple[ResolvedConfig, TorchModel]:
    """The run that wrote the checkpoint, and its model with the checkpoint's weights."""
    found, step = checkpoint.locate(uri, Kernel.start())
    manifest = checkpoint.find_checkpoint(found, step, warn=_log.warning)
    config = saved_config(manifest, where=assemble.step_uri(found, manifest.step))
    engine = assemble.engine(config)
    engine.start()
    model = primitives.initialize_parallel_model(config, engine, materialise=False)
    if manifest.facts.without_base:
        below = base_weights(config, found, manifest)
        for name in below.specs:
            model.load_state_dict({name: below.read(name)}, strict=False)
    primitives.load_checkpoint(found, manifest, engine=engine, model=model)
    return config, cast(TorchModel, model)


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> int:
    """One token of ``logits`` [vocab]."""
    if temperature <= 0:
        return int(logits.argmax())
    if top_k is not None:
        floor = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    shifted = (logits - logits.max()).double() / temperature  # at most 0: no temperature makes it overflow upwards
    return int(torch.multinomial(shifted.softmax(0), 1, generator=draws))
