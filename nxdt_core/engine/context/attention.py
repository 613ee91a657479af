"""Two ways to exchange keys and values between the ranks that share a sequence: a ring, and one all-gather.

Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, queries stay. While a
block is computed, the next keys and values are on their way. In backward their gradients travel one step behind them:
the sum for a rank's keys starts at its neighbour and comes home after as many hops as the keys made. It travels in the
dtype of the keys, and each rank adds to it in float32.

Gathered keys and values: one collective per direction where the ring has as many hops as ranks, at the price of a whole
sequence of keys and values in memory while a layer runs. Each rank saves its own; they are gathered again in backward.

Ranks share each sequence of any model whose plan names its attention cores. Everything but attention works on tokens
one by one and needs no change; positions are part of the batch. So the batch is sharded, and the attention cores are
replaced by ones that reach the other ranks' keys. (Torch's own context parallelism cannot run without an accelerator:
it has no sharding rule for the host's kernel.)

Their attention is one operator of autograd and of ``torch.compile``: a compiled graph has no room for messages on their
way, so that it holds the operator whole. Outside of one autograd calls what is inside: estimates then see what it
allocates and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from nxdt_core.distributed.collectives import gather_along, reduce_scatter_along
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.torch_versions import all_gather_single
from nxdt_core.engine.context.blocks import (
    ContextSequence,
    document_cache,
    local_blocks,
    prefix_blocks,
    ring_blocks,
    zigzag_shard,
    zigzag_unshard,
)
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.layouts import (
    AttentionCoreMissing,
    AttentionCoreUnknown,
    ContextSequenceDoesNotDivide,
    RingNeedsPointToPoint,
)
from nxdt_core.models.attention.grouped_query import AttentionSemantics
from nxdt_core.models.attention.partial_attention import (
    AttentionGradients,
    Block,
    Gradients,
    MergedAttention,
    accumulation_dtype,
    contiguous_heads,
    sink_gradients,
)
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.step_context import StepContext

_SEQUENCE = 2
"""The dimension of queries, keys and values that is sharded."""


_Part = tuple[int, list[Block], torch.Tensor, torch.Tensor]
"""Rank that has them, blocks of this rank's queries with keys and values, the keys and the values."""


ContextMethod = Literal["ring", "gather"]
"""Way in which keys and values travel."""


def ring_parts(key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence) -> Iterator[_Part]:
    """Yield the keys and values of each rank, this one's first, while the next ones are being received. Collective.

    No rank ever holds more than two shards of keys and values.
    """
    group, chunk = sequence.group, key.shape[_SEQUENCE] // 2
    rank, ranks = group.rank(), group.size()
    packed = torch.cat((key, value), -1)  # one message a hop
    for step in range(ranks):
        following = _begin_hop(packed, group) if step + 1 < ranks else None
        source = (rank - step) % ranks
        blocks = ring_blocks(rank, source, ranks, chunk, sequence.documents, sequence.window)
        yield source, blocks, packed[..., : key.shape[-1]], packed[..., key.shape[-1] :]
        if following is not None:
            packed = following()


def ring_backward(
    sums: AttentionGradients, key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's keys and values, and add those of its queries to ``sums``. Collective."""
    group, own, pending = sequence.group, sequence.group.rank(), None
    local = torch.empty(0)
    for source, blocks, keys, values in ring_parts(key, value, sequence):
        width = key.shape[-1] + value.shape[-1]
        total = key.new_zeros((*key.shape[:-1], width), dtype=accumulation_dtype(key.dtype))
        for block in blocks:
            sums.add(block, keys, values, total[..., : key.shape[-1]], total[..., key.shape[-1] :])
        if source == own:
            local = total
            continue
        if pending is not None:
            total += pending()
        pending = _begin_hop(total.to(key.dtype), group)
    if pending is not None:
        local += pending()
    return local[..., : key.shape[-1]], local[..., key.shape[-1] :]


def _begin_hop(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send ``tensor`` to the next rank, and return a function that waits for it and for the previous rank's.

    Several may be on their way at once: all ranks start them in one order, by which backends match them.
    """
    rank, ranks = group.rank(), group.size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )

    def wait(sent: torch.Tensor = tensor) -> torch.Tensor:  # which is kept until it has left
        for work in works:
            work.wait()
        return received

    return wait


def gathered_parts(key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence) -> Iterator[_Part]:
    """Yield this rank's keys and values, then those of the whole sequence in its own order, by one all-gather."""
    group, documents, window = sequence.group, sequence.documents, sequence.window
    layout = group.rank(), group.size(), key.shape[_SEQUENCE] // 2
    own = torch.cat((key, value), -1)  # one message; kept until it has left
    everything = own.new_empty((group.size(), *own.shape))
    work = all_gather_single(everything.flatten(0, 1), own, group=group, async_op=True)  # gloo knows no other form
    yield group.rank(), local_blocks(*layout, documents, window), key, value
    work.wait()
    keys, values = zigzag_unshard(everything.unbind(0), _SEQUENCE).tensor_split((key.shape[-1],), -1)
    del own, everything
    yield group.rank(), prefix_blocks(*layout, documents, window), keys, values


def gathered_backward(
    sums: AttentionGradients, key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :func:`ring_backward` does by one all-gather and one reduce-scatter."""
    group, dtype = sequence.group, accumulation_dtype(key.dtype)
    grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    parts = gathered_parts(key, value, sequence)
    _, blocks, _, _ = next(parts)
    for block in blocks:
        sums.add(block, key, value, grad_key, grad_value)
    _, blocks, keys, values = next(parts)
    grad_whole = keys.new_zeros((*keys.shape[:-1], keys.shape[-1] + values.shape[-1]), dtype=dtype)
    grad_keys, grad_values = grad_whole.tensor_split((keys.shape[-1],), -1)
    for block in blocks:
        sums.add(block, keys, values, grad_keys, grad_values)
    low_precision_gradient = grad_whole.to(key.dtype)  # as keys and values travel
    shards = [zigzag_shard(low_precision_gradient, rank, group.size(), _SEQUENCE) for rank in range(group.size())]
    summed = reduce_scatter_along(torch.stack(shards), 0, group)[0]
    grad_key += summed[..., : key.shape[-1]]
    grad_value += summed[..., key.shape[-1] :]
    return grad_key, grad_value


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        query: [batch, heads, seq / ranks, head_dim], the rank's zig-zag shard.
        key: [batch, kv_heads, seq / ranks, head_dim].
        value: as ``key``.
        sequence: scale, cap, ranks, documents, window and sinks.

    Returns:
        Output, as ``query`` and as wide as ``value``, and log-sum-exp.
    """
    merged = MergedAttention(query, value, sequence.scale, sequence.softcap)
    parts = ring_parts if sequence.method == "ring" else gathered_parts
    for _, blocks, keys, values in parts(key, value, sequence):
        for block in blocks:
            merged.add(block, keys, values)
    return merged.result(sequence.sinks)


def gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sequence: ContextSequence,
) -> Gradients:
    """Return the gradients from those of the output, and from what :func:`attend` took and gave. Collective."""
    sums = AttentionGradients(grad, query, value, output, lse, sequence.scale, sequence.softcap)
    backward = ring_backward if sequence.method == "ring" else gathered_backward
    grad_key, grad_value = backward(sums, key, value, sequence)
    return sums.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def shard_sequence(batch: Batch, mesh: ParallelMesh) -> Batch:
    """Return this rank's tokens of ``batch``: every field [micro_batch, seq / cp], with ``position_ids`` filled in.

    Raises:
        ContextSequenceDoesNotDivide: the sequence is not a multiple of twice the context parallel ranks.
    """
    rank, ranks = mesh.rank("cp"), mesh.size("cp")
    if ranks == 1:
        return batch
    length = batch.input_ids.shape[1]
    if length == 0 or length % (2 * ranks):
        raise ContextSequenceDoesNotDivide(length=length, ranks=ranks)
    if batch.position_ids is None:
        positions = torch.arange(length, device=batch.input_ids.device)
        batch = replace(batch, position_ids=positions.expand_as(batch.input_ids))
    return batch.map(lambda tensor: zigzag_shard(tensor, rank, ranks, dim=1))


def unshard_sequence(tensor: torch.Tensor, mesh: ParallelMesh, dim: int = 1) -> torch.Tensor:
    """Return the whole sequence, in its own order, from every rank's shard along ``dim``. Collective.

    Differentiable: each rank's gradient is the sum over ranks for the tokens that it holds.
    """
    group = mesh.group("cp")
    if group is None:
        return tensor
    shards = gather_along(tensor.unsqueeze(0), 0, group)
    return zigzag_unshard(shards.unbind(0), dim % tensor.ndim)


def apply_context_parallel(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, method: ContextMethod) -> None:
    """Replace each of the plan's attention cores by a :class:`ContextParallelAttention`.

    Args:
        module: a model or a pipeline stage of one, changed in place.
        plan: its ``attention_cores`` are replaced.
        mesh: nothing is done where its ``cp`` is 1.
        method: ``ring``, or ``gather`` where one collective is quicker than hops; a device's profile says which.

    Raises:
        AttentionCoreMissing: the plan names no cores, or ones that the model does not have.
        AttentionCoreUnknown: a core that does not say what it computes, or whose tokens see later ones.
        RingNeedsPointToPoint: the devices of ``mesh`` have collectives only.
    """
    group = mesh.group("cp")
    if group is None:
        return
    cores = [(path, core) for path, core in module.named_modules() if matches_any(plan.attention_cores, path)]
    # A pipeline stage without layers has no attention.
    layers = None if plan.pipeline is None else module.get_submodule(plan.pipeline.layers)
    has_layers = layers is None or any(True for _ in layers.children())
    if not plan.attention_cores or (not cores and has_layers):
        raise AttentionCoreMissing(patterns=plan.attention_cores, ranks=group.size())
    device = torch.device(mesh.mesh("cp").device_type)
    if method == "ring" and not profile_of(device).point_to_point:
        raise RingNeedsPointToPoint(device_type=device.type)
    for path, core in cores:
        semantics = core_semantics(path, core)
        if semantics.dropout:
            raise AttentionCoreUnknown(path=path, core=type(core).__qualname__, reason="it has dropout")
        parent, _, name = path.rpartition(".")
        sharded = ContextParallelAttention(group, method=method, semantics=semantics)
        setattr(module.get_submodule(parent), name, sharded)


class ContextParallelAttention(nn.Module):
    """An attention core over a sequence that is sharded over the ranks of a group, called as the core that it
    replaces."""

    def __init__(self, group: dist.ProcessGroup, *, method: ContextMethod, semantics: AttentionSemantics) -> None:
        """``semantics``: causal, of the core that it replaces."""
        super().__init__()
        self.ranks, self.method, self.semantics = group.size(), method, semantics
        self.group_name = group.group_name

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the keys of all ranks. Collective, forward and backward.

        Args:
            query: [batch, heads, seq / cp, head_dim], the tokens that :func:`shard_sequence` gives this rank.
            key: [batch, kv_heads, seq / cp, head_dim].
            value: as ``key``.
            document_ids: int64 [batch, seq / cp], of the same tokens; None: one document a row.
            step: unused, since no mask is made.
            sinks: [heads], scores that take part in the softmax and have no value.

        Returns:
            As ``query``.
        """
        scale, window = self.semantics.scale, self.semantics.window
        if window is not None and window >= query.shape[2] * self.ranks:
            window = None
        dtype = compute_dtype(query)  # autocast does not know the function
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        heads = (contiguous_heads(tensor.to(dtype)) for tensor in (query, key, value))
        settings = (scale, self.semantics.softcap, window, self.method, self.group_name)
        output: torch.Tensor
        if torch.compiler.is_compiling():
            output, _ = _attention(*heads, document_ids, sinks, *settings)
        else:
            output = _ContextAttention.apply(*heads, document_ids, sinks, *settings)  # type: ignore[no-untyped-call]
        return output

    def extra_repr(self) -> str:
        """Method and number of ranks."""
        return f"method={self.method}, ranks={self.ranks}"


def core_semantics(path: str, core: nn.Module) -> AttentionSemantics:
    """Return what ``core`` computes, as its class says. A subclass that computes something else must say so itself.

    Raises:
        AttentionCoreUnknown: it does not say so, or its tokens see later ones.
    """

    def refusal(reason: str) -> NxdtError:
        return AttentionCoreUnknown(path=path, core=type(core).__qualname__, reason=reason)

    kinds = type(core).__mro__
    declared = next((depth for depth, kind in enumerate(kinds) if "semantics" in vars(kind)), None)
    if declared is None:
        raise refusal("it does not say what it computes")
    done = next(depth for depth, kind in enumerate(kinds) if "forward" in vars(kind))
    if done < declared:
        raise refusal("it overrides forward() and not semantics()")
    semantics: AttentionSemantics = core.semantics()  # type: ignore[operator]
    if not semantics.causal:
        raise refusal("its tokens see later ones")
    return semantics


def _sequence(
    document_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    method: str,
    group_name: str,
) -> ContextSequence:
    documents = document_cache(group_name)
    return ContextSequence(
        scale=scale,
        softcap=softcap,
        group=documents.group,
        method=method,
        documents=None if document_ids is None else documents(document_ids),
        window=window,
        sinks=sinks,
    )


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *settings: Any,
    ) -> torch.Tensor:
        ctx.sequence = _sequence(document_ids, sinks, *settings)
        output, lse = attend(query, key, value, ctx.sequence)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        of_inputs = gradients(grad, query, key, value, output, lse, ctx.sequence)
        of_sinks = None if sinks is None else sink_gradients(grad, output, lse, sinks)
        return *of_inputs, None, of_sinks, None, None, None, None, None


@torch.library.custom_op("nxdt::context_parallel_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    return attend(query, key, value, _sequence(document_ids, sinks, scale, softcap, window, method, group_name))


@_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = query.shape
    output = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    return output, query.new_empty((batch, heads, rows), dtype=accumulation_dtype(query.dtype))


@torch.library.custom_op("nxdt::shared_attention_backward", mutates_args=())
def _gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    document_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; contiguous, and none a view of another, as operators must give
    them."""
    sequence = _sequence(document_ids, sinks, scale, softcap, window, method, group_name)
    of_query, of_key, of_value = gradients(grad, query, key, value, output, lse, sequence)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


@_gradients.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, document_ids, sinks, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, document_ids, sinks)


def _differentiated(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    _, _, _, output, lse, _, sinks = ctx.saved_tensors
    of_sinks = None if sinks is None else sink_gradients(grad, output, lse, sinks)
    return *_gradients(grad, *ctx.saved_tensors, *ctx.settings), None, of_sinks, None, None, None, None, None


_attention.register_autograd(_differentiated, setup_context=_keep)
