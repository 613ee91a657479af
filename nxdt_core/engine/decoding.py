"""Generation with a cache of keys and values, in every layout but that of context parallelism.

Each pass sends the new tokens alone through the stages of a pipeline and the shards of tensor parallelism. On a device
that can record passes, a pass and the choice of its tokens is one launch, collectives of tensor parallelism included.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.context.attention import core_semantics
from nxdt_core.errors.base import NxdtError
from nxdt_core.models.attention.cache import AttentionSlot, KeyValueCache
from nxdt_core.models.patterns import matches_any, modules_at, styled
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.parallel_model import CacheUnsupported, Decoding, TokenChoice
from nxdt_core.protocols.plan import ParallelPlan

_log = logging.getLogger(__name__)
_COLUMNS = 256
"""Columns of a fixed cache are a multiple of this, or the window, so that prompts of several lengths share it."""


def attention_slots(modules: Sequence[nn.Module], plan: ParallelPlan) -> list[AttentionSlot]:
    """Return the attention cores of a rank's stages.

    Raises:
        CacheUnsupported: keys and values cannot be kept for them.
    """
    if not plan.attention_cores:
        raise CacheUnsupported("the model's plan names no attention cores")
    slots = []
    for module in modules:
        for path, core in module.named_modules():
            if matches_any(plan.attention_cores, path):
                parent, _, name = path.rpartition(".")
                try:
                    slots.append((module.get_submodule(parent), name, core_semantics(path, core)))
                except NxdtError as error:
                    raise CacheUnsupported(error.what().rstrip(".")) from error
    return slots


def check_positions_stay(modules: Sequence[nn.Module], lengths: Sequence[int], columns: int) -> None:
    """Check that the keys of texts of ``lengths`` stay while these grow to ``columns`` tokens.

    Rotary modules say it, such as :class:`~nxdt_core.models.rotary.RotaryEmbedding`: by ``kept`` and ``original``.

    Raises:
        CacheUnsupported: they change.
    """
    for part in (part for module in modules for part in module.modules()):
        positions_stay: Callable[[int, int], bool] | None = getattr(part, "keys_unchanged", None)
        if positions_stay is not None and not positions_stay(min(lengths), columns):
            raise CacheUnsupported(f"the rotary frequencies change where a text outgrows {part.original} tokens")


def records_passes(sizes: MeshSizes, *, sharded: bool) -> bool:
    """Return whether passes of generation can be recorded in a layout: weights stay where they are, and the host takes
    no part in what a pass receives from other ranks. ``sharded``: FSDP2 holds the weights."""
    return sizes.pp * sizes.cp * sizes.ep == 1 and not (sharded and sizes.zero_stage == 3)


@contextmanager
def last_rows_only(modules: Sequence[nn.Module], plan: ParallelPlan, index: int) -> Iterator[None]:
    """Let heads compute the logits of token ``index`` of each row alone within the block."""
    handles = [
        part.register_forward_pre_hook(lambda _, args: (args[0][:, index : index + 1], *args[1:]))
        for module in modules
        for part in modules_at(module, styled(plan, "vocab_head")).values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(kw_only=True)
class CachedDecoding(Decoding):
    """Passes over the new tokens of all rows, in every layout."""

    cache: KeyValueCache
    """Keys and values of this rank's layers."""
    last_logits: Callable[[Batch, int, KeyValueCache], torch.Tensor]
    """Runs the model on a batch and extends the cache. The integer is how many of the batch's columns count; the result
    is the logits [rows, vocab] of the last of these."""
    multiple: int = 1
    """Divisor of the number of columns of a pass."""

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocab] behind ``input_ids`` [rows, tokens]."""
        tokens = input_ids.shape[1]
        padded = functional.pad(input_ids, (0, -tokens % self.multiple))  # no token sees a later one
        positions, documents = self.cache.places(padded.shape[1])
        positions[:, tokens:] = 0  # a text is no longer for what fills it up
        batch = Batch(input_ids=padded, labels=padded, position_ids=positions, document_ids=documents)
        return self.last_logits(batch, tokens, self.cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only."""
        self.cache.keep(rows)


@dataclass
class Recorded:
    """A pass for which all memory is allocated, with the choice of its tokens."""

    cache: KeyValueCache
    choice: TokenChoice
    launch: Callable[[], None] | None = None
    """Launches the recording; None until it has run once."""


@final
@dataclass(kw_only=True)
class RecordedDecoding(CachedDecoding):
    """Cached decoding on a device that records passes, so that the host does not wait after each token."""

    columns: int
    """Tokens that the longest row can grow to."""
    logits: Callable[[Batch], torch.Tensor]
    """Returns the logits [rows, 1, vocab] of a batch on the device."""
    passes: Callable[[], AbstractContextManager[None]]
    """Returns a context around passes."""
    device: torch.device
    weights: Callable[[], Iterable[nn.Parameter]]
    """Returns the weights that passes read, in the memory that a recording has the addresses of."""
    recordings: dict[Hashable, Recorded]
    """The model's last recording, which the next call of equal shapes uses again."""

    def blocks(self, choice: TokenChoice, left: Callable[[], int], window: int) -> Iterator[list[list[int]]]:
        """Yield the next columns of tokens, several at a time; see the protocol."""
        columns = min(-(-self.columns // _COLUMNS) * _COLUMNS, max(self.columns, window))
        addresses = tuple(local_of(weight).data_ptr() for weight in self.weights())
        key = self.cache.rows, columns, window, choice.key, addresses
        recorded = self.recordings.pop(key, None)
        self.recordings.clear()  # before as much memory is allocated again
        with torch.inference_mode(False), torch.no_grad():
            if recorded is None:
                recorded = Recorded(self.cache.fixed(columns), copy.copy(choice))
                recorded.choice.state = {name: torch.empty_like(value) for name, value in choice.state.items()}
            recorded.cache.take(self.cache)
            choice.state = {name: tensor.copy_(choice.state[name]) for name, tensor in recorded.choice.state.items()}
        self.cache = cache = recorded.cache

        def run() -> None:
            positions, ids = cache.begin_pass(window), recorded.choice.state["tokens"]
            if self.multiple > 1:  # no token sees a later one
                positions, ids = (functional.pad(each, (0, self.multiple - 1)) for each in (positions, ids))
            recorded.choice.choose(self.logits(Batch(input_ids=ids, labels=ids, position_ids=positions))[:, 0])

        try:
            while (count := choice.begin(left())) > 0:
                with self.passes(), cache.in_place():
                    for _ in range(count):
                        if recorded.launch is not None:
                            recorded.launch()
                            continue
                        run()  # first: it loads and compiles kernels, which a recording cannot
                        try:
                            recorded.launch = profile_of(self.device).operations.recorded(run, self.device)
                        except RuntimeError as error:  # such as an operation that waits for the device
                            _log.debug("each token's operations are launched one by one: %s", error)
                            recorded.launch = run
                yield choice.written(count)
        finally:
            self.recordings.clear()
            self.recordings[key] = recorded
