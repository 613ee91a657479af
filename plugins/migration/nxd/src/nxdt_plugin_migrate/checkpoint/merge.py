"""Shards of all ranks into whole tensors under their Hugging Face names.

The models of ``model_source: hf`` keep Hugging Face's names, with global layer numbers on every pipeline stage, but for
the fused projections. How each is cut, attention heads among them, is known from the layers that NxD builds; nothing in
the files says it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from nxdt_core.protocols.plan import AttentionHeads
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor, concatenated
from nxdt_plugin_migrate.errors import NeuronxReplicasDiffer


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueSlots:
    """Places of key and value heads over all ranks."""

    query_heads: int
    kv_heads: int
    copies: int
    """Slots that hold the same head."""
    adjacent: bool
    """Whether copies are adjacent."""

    @property
    def count(self) -> int:
        """Slots in all."""
        return self.kv_heads * self.copies

    def of(self, head: int) -> list[int]:
        """Slots that hold ``head``."""
        if self.adjacent:
            return list(range(head * self.copies, (head + 1) * self.copies))
        return list(range(head, self.count, self.kv_heads))

    def queries(self) -> list[int]:
        """Return the position of each query head of the whole model among those of all ranks."""
        each = self.query_heads // self.count
        return [slot * each + at for head in range(self.kv_heads) for slot in self.of(head) for at in range(each)]

    def same(self, heads: torch.Tensor) -> bool:
        """Return whether ``heads`` [slot, …] are equal wherever they should be copies."""
        return all(
            torch.equal(heads[slot], heads[slots[0]])
            for slots in (self.of(head) for head in range(self.kv_heads))
            for slot in slots[1:]
        )


def order_of(heads: torch.Tensor, *, query_heads: int, kv_heads: int, copies: int) -> KeyValueSlots | None:
    """Return the slots whose order makes the copies of ``heads`` [slot, …] equal; None if neither order does."""
    for adjacent in (False, True):
        slots = KeyValueSlots(query_heads=query_heads, kv_heads=kv_heads, copies=copies, adjacent=adjacent)
        if slots.same(heads):
            return slots
    return None


Stages = Sequence[Sequence[Mapping[str, LazyTensor]]]
"""By pipeline stage and tensor-parallel rank: that rank's tensors by name."""

_ROWS = ("embed_tokens.weight", "lm_head.weight")
_COLUMNS = ("down_proj.weight",)
_WHOLE = ("norm.weight", "layernorm.weight")
_HALVES = "gate_up_proj.weight"
_ATTENTION = re.compile(r"(.*self_attn\.)(?:qkv_proj\.weight(_qkv|_q|_k|_v)?|([qkvo])_proj\.weight)")
_TABLES = ("inv_freq",)
"""Buffers of old checkpoints, computed and not learned."""


def parameters_of(names: Iterable[str]) -> list[str]:
    """``names`` without buffers."""
    return [name for name in names if not name.endswith(_TABLES)]


class Merger:
    """Merges any number of families of tensors that are sharded identically: weights, and their optimizer state.

    The first family that is merged must be the weights: the order of replicated heads is read off their keys.
    """

    def __init__(self, heads: AttentionHeads, directory: str) -> None:
        self._heads = heads
        self._directory = directory
        self._keys: list[tuple[LazyTensor, int, int]] = []
        self._adjacent: bool | None = None

    def merge(self, stages: Stages) -> dict[str, LazyTensor]:
        """Whole tensors by Hugging Face name.

        Raises:
            NeuronxMisfit: shards do not make up a tensor, or one has a name that is not known.
        """
        merged: dict[str, LazyTensor] = {}
        for ranks in stages:
            for name in parameters_of(dict.fromkeys(name for rank in ranks for name in rank)):
                parts = [rank[name] for rank in ranks if name in rank]
                if len(parts) != len(ranks):
                    raise parts[0].misfit("some tensor-parallel ranks lack it")
                for leaf in self._named(name, parts, ranks):
                    twice = merged.get(leaf.name)  # a tied embedding is on the first and on the last stage
                    merged[leaf.name] = leaf if twice is None else self._equal([twice, leaf])
        return merged

    def _named(
        self, name: str, parts: list[LazyTensor], ranks: Sequence[Mapping[str, LazyTensor]]
    ) -> Iterable[LazyTensor]:
        attention = _ATTENTION.fullmatch(name)
        if attention is not None:
            prefix, fused, single = attention.groups()
            output = [rank.get(f"{prefix}o_proj.weight") for rank in ranks]
            found = [leaf for leaf in output if leaf is not None]
            return self._attention(prefix, fused, single, parts, concatenated(found or parts, 1).shape[1])
        if name.endswith(_HALVES):
            return _halves(name, parts)
        if name.endswith(_ROWS):
            return [concatenated(parts, 0)]
        if name.endswith(_COLUMNS):
            return [concatenated(parts, 1)]
        if name.endswith(_WHOLE):
            return [self._equal(parts)]
        if name.startswith("language_model."):
            raise parts[0].misfit("it is of a model of 'model_source: megatron', of which 'hf' models only are read")
        raise parts[0].misfit("how tensors of this name are cut is not known")

    def _attention(
        self, prefix: str, fused: str | None, single: str | None, parts: list[LazyTensor], width: int
    ) -> Iterable[LazyTensor]:
        """``width`` is that of all query heads."""
        queries, kv_heads = self._heads.query_heads, self._heads.kv_heads
        size, rest = divmod(width, queries)
        if rest:
            raise parts[0].misfit(f"{width} columns of the output projection are not {queries} heads")
        kind = single or (fused or "").removeprefix("_")
        if kind == "o":
            return [self._outputs(concatenated(parts, 1), size)]
        rows = sum(part.shape[0] for part in parts)
        if kind == "q":
            return [self._queries(concatenated(parts, 0, f"{prefix}q_proj.weight"), size)]
        if kind in ("k", "v"):
            copies = self._copies(parts[0], rows, kv_heads * size)
            return [self._keys_of(concatenated(parts, 0, f"{prefix}{kind}_proj.weight"), size, copies)]
        copies = self._copies(parts[0], rows - width, 2 * kv_heads * size)
        own, each = width // len(parts), kv_heads * size * copies // len(parts)
        cuts = (("q", 0, own), ("k", own, each), ("v", own + each, each))
        thirds = {
            letter: concatenated(
                [part.rows(start, count, part.name) for part in parts], 0, f"{prefix}{letter}_proj.weight"
            )
            for letter, start, count in cuts
        }
        keys = [self._keys_of(thirds[letter], size, copies) for letter in "kv"]
        return [self._queries(thirds["q"], size), *keys]

    def _copies(self, part: LazyTensor, rows: int, once: int) -> int:
        copies, rest = divmod(rows, once)
        if rest or copies < 1:
            raise part.misfit(f"{rows} rows of keys or values are not a multiple of the {once} that the model has")
        return copies

    def _keys_of(self, leaf: LazyTensor, size: int, copies: int) -> LazyTensor:
        if copies == 1:
            return leaf
        if leaf.name.endswith("k_proj.weight"):
            self._keys.append((leaf, size, copies))

        def once(tensor: torch.Tensor) -> torch.Tensor:
            slots = self._slots(copies)
            heads = tensor.reshape(slots.count, size, -1)
            if not slots.same(heads):
                raise NeuronxReplicasDiffer(tensor=leaf.name, path=self._directory)
            return torch.cat([heads[slots.of(head)[0]] for head in range(slots.kv_heads)])

        return leaf.changed(once, (leaf.shape[0] // copies, *leaf.shape[1:]))

    def _queries(self, leaf: LazyTensor, size: int) -> LazyTensor:
        if leaf.shape[0] != self._heads.query_heads * size:
            raise leaf.misfit(f"{leaf.shape[0]} rows are not {self._heads.query_heads} heads of {size}")
        return leaf.changed(lambda tensor: self._in_order(tensor, size))

    def _outputs(self, leaf: LazyTensor, size: int) -> LazyTensor:
        return leaf.changed(lambda tensor: self._in_order(tensor.t(), size).t().contiguous())

    def _in_order(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        copies = self._keys[0][2] if self._keys else 1
        if copies == 1:
            return tensor
        return tensor.reshape(-1, size, tensor.shape[1])[self._slots(copies).queries()].reshape(tensor.shape)

    def _slots(self, copies: int) -> KeyValueSlots:
        """The order of the first layer whose heads distinguish the two orders; all layers have the same."""
        shape = {"query_heads": self._heads.query_heads, "kv_heads": self._heads.kv_heads, "copies": copies}
        if self._adjacent is None:
            for leaf, size, _ in self._keys:
                heads = leaf.read().reshape(-1, size, leaf.shape[1])
                found = order_of(heads, **shape)
                if found is None:
                    raise NeuronxReplicasDiffer(tensor=leaf.name, path=self._directory)
                self._adjacent = found.adjacent
                if not KeyValueSlots(**shape, adjacent=not found.adjacent).same(heads):
                    break
        return KeyValueSlots(**shape, adjacent=bool(self._adjacent))

    def _equal(self, parts: Sequence[LazyTensor]) -> LazyTensor:
        """One of the parts, once it has been compared with the others."""
        first = parts[0]
        if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
            raise first.misfit("its copies have different shapes")
        return replace(first, read=partial(self._compared, parts), stored=all(part.stored for part in parts))

    def _compared(self, parts: Sequence[LazyTensor]) -> torch.Tensor:
        first = parts[0].read()
        if not all(torch.equal(first, part.read()) for part in parts[1:]):
            raise NeuronxReplicasDiffer(tensor=parts[0].name, path=self._directory)
        return first


def _halves(name: str, parts: Sequence[LazyTensor]) -> list[LazyTensor]:
    """The gate and the up projection, of which each rank holds a share of the one above a share of the other."""
    rows = [part.shape[0] // 2 for part in parts]
    if any(part.shape[0] % 2 for part in parts):
        raise parts[0].misfit("its two halves are of different sizes")
    stem = name.removesuffix(_HALVES)
    return [
        concatenated(
            [part.rows(at * half, half, name) for part, half in zip(parts, rows, strict=True)], 0, stem + half_name
        )
        for at, half_name in enumerate(("gate_proj.weight", "up_proj.weight"))
    ]
