"""A trained model out of a checkpoint, with the tokenizer of its run: for inference."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from nxdt_core import checkpoint
from nxdt_core.checkpoint.hf.source import HFSource
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.chat.keys import ChatKeys
from nxdt_core.data.chat.rendering import stop_ids
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.errors.training import CannotGenerate
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.inference.generate import Sampling, continue_ids
from nxdt_core.train.step import initialize_parallel_model
from nxdt_core.train.weights.base import base_digest, base_weights, load_weights
from nxdt_core.train.weights.saved_config import locate, named_config, saved_run

__all__ = ["LoadedModel", "load_model"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with a checkpoint's weights."""

    config: ResolvedConfig
    """Of the run that wrote them."""
    model: ParallelModel
    tokenizer: Tokenizer
    chat_keys: ChatKeys
    """How the run's data made text of messages."""
    step: int
    """Optimizer steps that the weights have seen."""
    source: HFSource | None = None
    """The Hugging Face directory that the weights came from; None: they came from elsewhere."""

    @property
    def window(self) -> int:
        """Tokens that it sees at once."""
        return self.config.run.data.seq_length

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens of :func:`~nxdt_core.data.chat.rendering.stop_ids`, and those that the weights' source names."""
        theirs = () if self.source is None else self.source.stops_of(self.tokenizer)
        return tuple(dict.fromkeys((*stop_ids(self.chat_keys, self.tokenizer), *theirs)))

    def continuation(self, ids: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yield the tokens that it writes behind ``ids``, until it ends the text or its turn."""
        vocab_size = self.tokenizer.vocab_size
        return continue_ids(
            self.model, ids, sampling, window=self.window, vocab_size=vocab_size, stop_ids=self.stop_ids
        )


def load_model(
    uri: str, *, base: str | None = None, config: str | None = None, trusted: Sequence[str] = ()
) -> LoadedModel:
    """Return the model of a checkpoint, or of the newest good one of a run's.

    Args:
        uri: its address.
        base: address of the weights below an adapter, where the checkpoint leaves them out and they are not where its
            run took them.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that the checkpoint keeps.
        trusted: files of public keys, one of which must have signed what is loaded; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.

    Raises:
        SavedConfigUnusable: the model cannot be built here, or needs what a checkpoint may not decide.
        CheckpointNotTrusted: what is loaded lacks a valid signature of one of the keys.
        CannotGenerate: the run has no tokenizer.
        AdapterOfAnotherBase: the weights below are others than the run's.
        NxdtError: what is wrong with the checkpoint.
    """
    own, keys = named_config(config, trusted)
    found, step = locate(uri, own)
    manifest = checkpoint.find_checkpoint(found, step, warn=_log.warning, trusted=keys)
    saved = saved_run(manifest, where=build.step_uri(found, manifest.step), config=own, base=base is None)
    run = saved.config
    tokenizer = build.tokenizer(run)
    if tokenizer is None:
        raise CannotGenerate(reason="its run names no tokenizer")
    engine = build.engine(run)
    engine.start()
    model = initialize_parallel_model(run, engine, materialise=False)
    if manifest.facts.without_base:
        below = base_weights(run, found, manifest, base=base, trusted=keys)
        for name, weight in zip(below.specs, below.read([*below.specs]), strict=True):
            model.load_state_dict({name: weight}, strict=False)
        if base_digest(model, engine.ranks) != manifest.facts.base:
            raise AdapterOfAnotherBase(where=build.step_uri(found, manifest.step), base=below.origin)
    load_weights(found, manifest, engine=engine, model=model)
    return LoadedModel(
        config=run,
        model=model,
        tokenizer=tokenizer,
        chat_keys=saved.chat_keys,
        step=manifest.step,
        source=HFSource.of_facts(manifest.facts.hf),
    )
