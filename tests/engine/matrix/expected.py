"""What each rank of a layout may hold, derived from the plan and the sizes alone, and complaints where it holds more.

Losses cannot show this: a layout that replicates everything trains as one process does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.plan import ParallelPlan
from tests.engine.matrix.batches import ROWS, SEQ
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.measured import Measured

SLACK = 40_000
"""Bytes that are held beside weights and state: rotary tables, the last step's scalars, padding."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One parameter's part on one rank, in elements."""

    compute: int
    """As forward uses it: what tensor and expert parallelism leave."""
    shard: int
    """As the data parallel ranks share it, where they do."""


@dataclass(frozen=True, kw_only=True)
class ExpectedShards:
    """The parts of all ranks of a layout."""

    layout: Layout
    plan: ParallelPlan
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters."""
    layers: int

    def of(self, rank: int) -> dict[str, Share]:
        """The parameters of ``rank`` and its part of each.

        A tied pair on two stages is two tensors: where the owner is not, the user's goes by the owner's name.
        """
        stages = self._stages(rank)
        shares = {name: self._share(name, shape) for name, shape in self.shapes.items() if self._stage(name) in stages}
        for owner, user in self.plan.tied:
            if self._stage(user) in stages and self._stage(owner) != self._stage(user):
                shares[user if owner in shares else owner] = self._share(owner, self.shapes[owner])
        return shares

    def alone(self, name: str) -> bool:
        """Whether a parameter is of experts that no other rank has."""
        expert = matches_any(self.plan.experts.modules, name.rpartition(".")[0])
        return expert and self.layout.ep > 1 and self.layout.fsdp == self.layout.ep and self.layout.replicas == 1

    def width(self, module: str) -> int | None:
        """Output features on one rank of a module that tensor parallelism shards by them, else None."""
        styles = [style for pattern, style in self.plan.tensor.items() if matches(pattern, module)]
        if not styles or styles[0] not in ("column", "vocab_head"):
            return None
        owners = {user: owner for owner, user in self.plan.tied}
        name = f"{module}.weight"
        return self.shapes[owners.get(name, name)][0] // self._tensor_parts(name, module)

    def _stages(self, rank: int) -> set[int]:
        pp, stages = self.layout.pp, self.layout.stages
        place = rank // (self.layout.world // pp)  # pipeline stages lie farthest apart
        if self.layout.zbv:
            return {place, stages - 1 - place}
        return set(range(place, stages, pp))

    def _stage(self, name: str) -> int:
        first, *rest = name.split(".")
        if first == "layers":
            return int(rest[0]) // (self.layers // self.layout.stages)
        assert self.plan.pipeline is not None
        return 0 if first in self.plan.pipeline.first else self.layout.stages - 1

    def _share(self, name: str, shape: tuple[int, ...]) -> Share:
        module = name.rpartition(".")[0]
        expert = matches_any(self.plan.experts.modules, module)
        compute = prod(shape) // self._tensor_parts(name, module) // (self.layout.ep if expert else 1)
        shards = self.layout.fsdp // self.layout.ep if expert else self.layout.fsdp
        return Share(compute=compute, shard=compute // shards if self.layout.zero else compute)

    def _tensor_parts(self, name: str, module: str) -> int:
        heads = self.plan.heads
        if heads is not None and matches_any(heads.key_value, module):
            return min(self.layout.tp, heads.kv_heads)
        styles = [style for pattern, style in self.plan.tensor.items() if matches(pattern, module)]
        sharded = styles and styles[0] != "replicate"
        return self.layout.tp if sharded or matches_any(tuple(self.plan.experts.tensor), name) else 1


def complaints(shares: ExpectedShards, rank: int, held: Measured, *, item: int, state: int) -> Iterator[str]:
    """What ``rank`` holds beyond its part.

    Args:
        shares: of the layout.
        rank: this one.
        held: what it reported.
        item: bytes of an element.
        state: tensors that the optimizer keeps for each parameter.
    """
    own, zero = shares.of(rank), shares.layout.zero
    compute, shard = (sum(getattr(part, kind) for part in own.values()) * item for kind in ("compute", "shard"))
    yield from _weights(own, held, item, sharded=zero == 3)
    if zero >= 2:
        yield from _above("gradients", sum(held.gradients.values()), shard)
        yield from _above("gradients between micro-batches", held.activations.waiting_gradients, shard)
    else:
        yield from _above("gradients", sum(held.gradients.values()), compute)
    yield from _above("optimizer state", held.optimizer, state * shard)
    gathered = 0
    if zero in (1, 2) and shares.layout.fsdp > 1:  # forward's copy may stay, but of experts that no other rank has
        gathered = sum(part.compute for name, part in own.items() if not shares.alone(name)) * item
    masks = 0
    if shares.layout.packed:  # they live as long as their batches
        masks = shares.layout.micro_batches * ROWS * SEQ * SEQ * item
    yield from _above("everything alive", held.live, shard * (1 + state) + gathered + masks + SLACK)
    if zero == 3:
        for name, share in own.items():
            if name.startswith("layers"):
                found = held.activations.unsharded_weights.get(name, 0)
                yield from _above(f"{name} after forward", found, share.shard * item)
    yield from _activations(shares, held)


def _weights(own: Mapping[str, Share], held: Measured, item: int, *, sharded: bool) -> Iterator[str]:
    surplus = sorted(held.weights.keys() - own.keys())
    if surplus:
        yield f"holds {', '.join(surplus)}, which lie on other stages"
    for name, found in held.weights.items():
        if name in own:
            yield from _above(name, found, (own[name].shard if sharded else own[name].compute) * item)


def _activations(shares: ExpectedShards, held: Measured) -> Iterator[str]:
    layout, outputs, plan = shares.layout, held.activations.outputs, shares.plan
    inside = tuple(f"{block}." for block in plan.tensor_blocks)
    norms = tuple(norm.removesuffix(".weight") for norm in plan.norms if not norm.startswith(inside))
    for name, shapes in outputs.items():
        if layout.cp > 1 and any(SEQ in shape for shape in shapes):
            yield f"{name} gives out whole sequences: {sorted(shapes)}"
        if matches_any(norms, name):
            positions = SEQ // layout.cp // (layout.tp if layout.sp else 1)
            if any(shape[1] != positions for shape in shapes):
                yield f"{name} works on {sorted(shapes)}, not on {positions} of {SEQ} positions"
        width = shares.width(name)
        if width is not None and any(shape[-1] != width for shape in shapes):
            yield f"{name} gives out {sorted(shapes)}, not {width} features"
    if layout.cp > 1:
        # Experts keep [rows, features], as many rows as they were given: now and then 24.
        least = 3 if layout.moe else 1
        whole = sorted(shape for shape in held.activations.saved if SEQ in shape and len(shape) >= least)
        if whole:
            yield f"whole sequences are kept for backward: {whole}"


def _above(what: str, found: int, allowed: int) -> Iterator[str]:
    if found > allowed:
        yield f"{what}: {found} bytes instead of {allowed}"
