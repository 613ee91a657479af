"""Shards of all ranks into whole tensors under their Hugging Face names.

The models of ``model_source: hf`` keep Hugging Face's names, with global layer numbers on every pipeline stage, but for
the fused projections and the experts, which :mod:`rank_tensors` has renamed. How each is cut, attention heads among
them, is known from the layers that NxD builds; nothing in the files says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from nxdt_core.protocols.plan import AttentionHeads
from nxdt_plugin_migrate.checkpoint.rank_tensors import Stages, equal, hf_name, renamed
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor, concatenated
from nxdt_plugin_migrate.errors import NeuronxMisfit, NeuronxReplicasDiffer

_ROWS = (
    "embed_tokens.weight",
    "lm_head.weight",
    *(f"{name}_proj.{kind}" for name in ("gate", "up") for kind in ("weight", "bias")),
)
_COLUMNS = ("down_proj.weight",)
_WHOLE = (
    *(f"norm.{kind}" for kind in ("weight", "bias")),
    "embed_positions.weight",
    "down_proj.bias",
    "block_sparse_moe.gate.weight",
)
_HALVES = re.compile(r"(.*)gate_up_proj\.(weight|bias)")
_ATTENTION = re.compile(r"(.*self_attn\.)(?:(qkv|kv|[qkvo])_proj|(qkv|kv)_by_head)\.(weight|bias)(_qkv|_q|_k|_v)?")
_TIED = ("embed_tokens.weight", "lm_head.weight")
_TABLES = ("inv_freq",)
"""Buffers of old checkpoints, computed and not learned."""


def parameters_of(names: Iterable[str]) -> list[str]:
    """Return ``names`` without buffers."""
    return [name for name in names if not name.endswith(_TABLES)]


class Merger:
    """Merges any number of families of tensors that are sharded identically: weights, and their optimizer state.

    The first family that is merged must be the weights: the order of replicated heads is read off their keys.
    """

    def __init__(self, heads: AttentionHeads, shapes: Mapping[str, tuple[int, ...]], directory: str) -> None:
        """``shapes``: those of the model's tensors by Hugging Face name."""
        self._heads = heads
        self._shapes = shapes
        widths = [shape[1] for name, shape in shapes.items() if name.endswith("o_proj.weight")]
        self._size = widths[0] // heads.query_heads if widths else 0
        self._directory = directory
        self._keys: list[tuple[LazyTensor, int]] = []
        """Weights of keys of which ranks hold copies, and how many copies."""
        self._adjacent: bool | None = None

    def merge(self, stages: Stages) -> dict[str, LazyTensor]:
        """Return whole tensors by Hugging Face name.

        Raises:
            NeuronxMisfit: shards do not make up a tensor, or one has a name that is not known.
        """
        merged: dict[str, LazyTensor] = {}
        for ranks in ([renamed(rank, self._shapes) for rank in stage] for stage in stages):
            for name in parameters_of(dict.fromkeys(name for rank in ranks for name in rank)):
                parts = [rank[name] for rank in ranks if name in rank]
                if len(parts) != len(ranks):
                    raise parts[0].misfit("some tensor-parallel ranks lack it")
                for leaf in self._named(name, parts, ranks):
                    leaf = replace(leaf, name=hf_name(leaf.name))
                    twice = merged.get(leaf.name)
                    if twice is not None and not leaf.name.endswith(_TIED):
                        raise leaf.misfit(f"'{twice.where}' of another pipeline stage holds it, too")
                    merged[leaf.name] = leaf if twice is None else equal([twice, leaf])
        return merged

    def _named(
        self, name: str, parts: list[LazyTensor], ranks: Sequence[Mapping[str, LazyTensor]]
    ) -> Iterable[LazyTensor]:
        attention = _ATTENTION.fullmatch(name)
        if attention is not None:
            prefix, plain, by_head, form, suffix = attention.groups()
            if plain == "o" and form == "bias":
                return [equal(parts)]
            if by_head:
                return self._by_head(prefix, by_head, form, parts)
            output = [rank.get(f"{prefix}o_proj.weight") for rank in ranks]
            present = [leaf for leaf in output if leaf is not None]
            kind = (suffix or "").removeprefix("_") or plain
            width = concatenated(present, 1).shape[1] if present else self._heads.query_heads * self._size
            return self._attention(prefix, kind, form, parts, width)
        if halves := _HALVES.fullmatch(name):
            return _halves(halves[1], halves[2], parts)
        if name.endswith(_ROWS):
            return [concatenated(parts, 0)]
        if name.endswith(_COLUMNS):
            return [concatenated(parts, 1)]
        if name.endswith(_WHOLE):
            return [equal(parts)]
        raise parts[0].misfit("how tensors of this name are cut is not known")

    def _by_head(self, prefix: str, kinds: str, form: str, parts: list[LazyTensor]) -> Iterable[LazyTensor]:
        """Split Megatron's projection, in which the query, key and value rows of one head are adjacent."""
        whole = concatenated(parts, 0, f"{prefix}{kinds}_proj.{form}")
        if whole.name in self._shapes:
            return [whole]
        heads, rest = divmod(whole.shape[0], len(kinds) * self._size)
        if rest:
            raise whole.misfit(f"{whole.shape[0]} rows are not {len(kinds)} times heads of {self._size}")

        def of(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda tensor: tensor.reshape(heads, len(kinds), self._size, *tensor.shape[1:])[:, at].flatten(0, 1)

        shape = (heads * self._size, *whole.shape[1:])
        return [
            replace(whole.changed(of(at), shape), name=f"{prefix}{letter}_proj.{form}")
            for at, letter in enumerate(kinds)
        ]

    def _attention(
        self, prefix: str, kind: str, form: str, parts: list[LazyTensor], width: int
    ) -> Iterable[LazyTensor]:
        """``width`` is that of all query heads, also those that only fill up ranks."""
        size = self._size
        padded, rest = divmod(width, size)
        if rest or padded < self._heads.query_heads:
            heads = f"{self._heads.query_heads} heads of {size}"
            raise parts[0].misfit(f"{width} columns of the output projection are not {heads}")
        once = self._heads.kv_heads * size
        if kind == "o":
            whole = concatenated(parts, 1)
            shape = (whole.shape[0], self._heads.query_heads * size)
            return [whole.changed(lambda tensor: self._in_order(tensor.t(), padded).t().contiguous(), shape)]
        rows = sum(part.shape[0] for part in parts)
        if kind == "q":
            return [self._queries(concatenated(parts, 0, f"{prefix}q_proj.{form}"), padded)]
        if kind in ("k", "v"):
            copies = self._copies(parts[0], rows, once)
            return [self._keys_of(concatenated(parts, 0, f"{prefix}{kind}_proj.{form}"), copies)]
        copies = self._copies(parts[0], rows - width, 2 * once)
        of_query, of_key = width // len(parts), once * copies // len(parts)
        cuts = (("q", 0, of_query), ("k", of_query, of_key), ("v", of_query + of_key, of_key))
        thirds = {
            letter: concatenated(
                [part.rows(start, count, part.name) for part in parts], 0, f"{prefix}{letter}_proj.{form}"
            )
            for letter, start, count in cuts
        }
        keys = [self._keys_of(thirds[letter], copies) for letter in "kv"]
        return [self._queries(thirds["q"], padded), *keys]

    def _copies(self, part: LazyTensor, rows: int, once: int) -> int:
        copies, rest = divmod(rows, once)
        if rest or copies < 1:
            raise part.misfit(f"{rows} rows of keys or values are not a multiple of the {once} that the model has")
        return copies

    def _keys_of(self, leaf: LazyTensor, copies: int) -> LazyTensor:
        if copies == 1:
            return leaf
        if leaf.name.endswith("k_proj.weight"):
            self._keys.append((leaf, copies))

        def once(tensor: torch.Tensor) -> torch.Tensor:
            slots = self._slots(copies)
            heads = tensor.reshape(-1, self._size, *tensor.shape[1:])
            if not _are_copies(heads, slots):
                raise NeuronxReplicasDiffer(tensor=leaf.name, path=self._directory)
            return torch.cat([heads[of_head[0]] for of_head in slots])

        return leaf.changed(once, (leaf.shape[0] // copies, *leaf.shape[1:]))

    def _queries(self, leaf: LazyTensor, padded: int) -> LazyTensor:
        if leaf.shape[0] != padded * self._size:
            raise leaf.misfit(f"{leaf.shape[0]} rows are not {padded} heads of {self._size}")
        shape = (self._heads.query_heads * self._size, *leaf.shape[1:])
        return leaf.changed(lambda tensor: self._in_order(tensor, padded), shape)

    def _in_order(self, tensor: torch.Tensor, padded: int) -> torch.Tensor:
        """Return the query heads of the model, in its order, of ``tensor`` [padded · size, …]; others fill up
        the last slots of each key head."""
        copies = self._keys[0][1] if self._keys else 1
        if copies == 1 and padded == self._heads.query_heads:
            return tensor
        of_slot, rest = divmod(padded, self._heads.kv_heads * copies)
        if rest:
            reason = f"{padded} query heads do not divide among {self._heads.kv_heads * copies} key heads"
            raise NeuronxMisfit(tensor="self_attn.q_proj", path=self._directory, reason=reason)
        of_key = self._heads.query_heads // self._heads.kv_heads
        positions: list[int] = []
        for slots in self._slots(copies):
            positions += [slot * of_slot + at for slot in slots for at in range(of_slot)][:of_key]
        return tensor.reshape(padded, self._size, *tensor.shape[1:])[positions].flatten(0, 1)

    def _slots(self, copies: int) -> list[list[int]]:
        """Return the slots over all ranks that hold copies of each key head.

        Copies are adjacent or as far apart as there are heads. The first layer whose heads distinguish the two decides;
        all layers have the same order.
        """
        count = self._heads.kv_heads
        apart = [list(range(head, count * copies, count)) for head in range(count)]
        adjacent = [list(range(head * copies, (head + 1) * copies)) for head in range(count)]
        for leaf, _ in self._keys if self._adjacent is None else ():
            heads = leaf.read().reshape(-1, self._size, *leaf.shape[1:])
            fitting = [order is adjacent for order in (apart, adjacent) if _are_copies(heads, order)]
            if not fitting:
                raise NeuronxReplicasDiffer(tensor=leaf.name, path=self._directory)
            self._adjacent = fitting[0]
            if len(fitting) == 1:
                break
        return adjacent if self._adjacent else apart


def _are_copies(heads: torch.Tensor, slots: list[list[int]]) -> bool:
    """Return whether ``heads`` [slot, …] are equal in the slots of each key head."""
    return all(torch.equal(heads[slot], heads[of_head[0]]) for of_head in slots for slot in of_head[1:])


def _halves(stem: str, form: str, parts: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return the gate and the up projection, of which each rank holds a share of the one above a share of the other."""
    rows = [part.shape[0] // 2 for part in parts]
    if any(part.shape[0] % 2 for part in parts):
        raise parts[0].misfit("its two halves are of different sizes")
    return [
        concatenated(
            [part.rows(at * half, half, part.name) for part, half in zip(parts, rows, strict=True)],
            0,
            f"{stem}{half_name}_proj.{form}",
        )
        for at, half_name in enumerate(("gate", "up"))
    ]
