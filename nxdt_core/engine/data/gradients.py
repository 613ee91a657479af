"""Sums of gradients over ranks, which run while backward still computes others, and the global norm. No host waits.

:class:`OverlappedAllReduce` are those without ZeRO; FSDP2 has its own (:mod:`nxdt_core.engine.data.fsdp`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.collectives import all_reduce_bucketed, copy_from_flat, group_by_dtype
from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.models.quantised import QuantisedWeight

_BUCKET_BYTES = 32 * 2**20
"""Gradients that are summed in one call. Larger calls gain little, and the last one has nothing left to overlap."""
_LARGE_ELEMENTS = 2**24
"""Elements from which a tensor's norm is one kernel. Torch's kernel for many tensors takes as many in a launch, by
blocks that each have few bytes on the way: half of an H200's bandwidth for bfloat16."""
_IN_FLIGHT = 4
"""Calls that are not waited for; each has a copy of its gradients."""


class GradientReducer:
    """Sums the gradients of a step over ranks: which parameters over which group.

    Args:
        parameters: this rank's, by global name.
        mesh: its groups hold the other summands.
        tensor_partial: names whose gradient is a partial sum on each tensor parallel rank.
        data_reduced: FSDP2 sums over data and context parallel ranks.
        overlapped: without it, let these sums start in the backward that :meth:`begin_last_backward` announces.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        *,
        tensor_partial: Collection[str],
        data_reduced: bool,
        overlapped: bool = False,
    ) -> None:
        # In the order of the parameters, which all ranks share: that of a set of names differs between processes.
        chosen: dict[Dimension, list[nn.Parameter]] = {}
        self._data: list[OverlappedAllReduce] = []
        if not data_reduced:
            experts = {name for name, parameter in parameters.items() if "ep" in sharded_over(parameter)}
            dense = [parameter for name, parameter in parameters.items() if name not in experts]
            of_experts = [parameter for name, parameter in parameters.items() if name in experts]
            for group, summed in ((mesh.group("fsdp"), dense), (mesh.group("efsdp"), of_experts)):
                if group is not None and summed:
                    self._data.append(OverlappedAllReduce(group, summed, hooked=overlapped))
            chosen["dp_replicate"] = list(parameters.values())
        chosen["tp"] = [parameter for name, parameter in parameters.items() if name in tensor_partial]
        # Of heads that several tensor parallel ranks hold, each has only the gradient from its queries.
        chosen["tp_kv_replica"] = [parameter for parameter in parameters.values() if "tp_kv" in sharded_over(parameter)]
        self._sums = [(mesh.group(dimension), summed) for dimension, summed in chosen.items() if summed]

    def begin_last_backward(self) -> None:
        """Let sums over data parallel ranks start in the next backward, the last that adds to the gradients."""
        for sums in self._data:
            sums.begin()

    def reduce_all(self) -> None:
        """Sum each gradient over the ranks of its group, in place."""
        for sums in self._data:
            sums.finish()
        for group, parameters in self._sums:
            if group is not None:
                all_reduce_bucketed(group, [local_of(p.grad) for p in parameters if p.grad is not None])


def global_norm(
    tensors: Iterable[torch.Tensor | None],
    world: dist.ProcessGroup | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the 2-norm of all gradients, or of all weights, over all ranks and stages, each element counted once.

    Args:
        tensors: of the parameters in :attr:`nxdt_core.engine.parameters.StageParameters.owned`.
        world: all ranks; None for one that is alone.
        device: on which the result is.
        dtype: of the result and of its summation, the same on all ranks.

    Returns:
        A device scalar, equal on all ranks bit for bit.
    """
    small: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    of_large: list[torch.Tensor] = []
    of_quantised: list[torch.Tensor] = []
    for tensor in tensors:
        local = None if tensor is None else local_of(tensor.detach())
        if isinstance(local, QuantisedWeight):  # one after the other has its values
            of_quantised.append(torch.linalg.vector_norm(local.dequantised(), dtype=dtype))
        elif local is not None and local.numel() >= _LARGE_ELEMENTS:
            of_large.append(torch.linalg.vector_norm(local, dtype=dtype))
        elif local is not None:
            small.append(local)
    for same in group_by_dtype(small):
        norms += torch._foreach_norm(same, 2, dtype)
    norms += of_large + of_quantised
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device, dtype=dtype)
    if world is not None:
        dist.all_reduce(squares, group=world)
    return squares.sqrt()


class OverlappedAllReduce:
    """Sums over the ranks of a group in buckets, in the order in which backward computes the gradients.

    All ranks start the same sums in the same order, whichever gradients a rank has first: a bucket waits for the one
    before it. What was not started when :meth:`finish` is called is summed then.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], *, hooked: bool) -> None:
        """
        Args:
            group: ranks over which to sum.
            parameters: of this rank, in the order of the model, the same on all ranks.
            hooked: whether sums start in backward after :meth:`begin`; otherwise all of them start in :meth:`finish`.
        """
        self._group = group
        self._buckets: list[list[nn.Parameter]] = []
        """Neighbours of one dtype, up to the size of a bucket."""
        for _, same in groupby(reversed(parameters), lambda parameter: parameter.dtype):
            self._buckets += buckets(same, lambda parameter: local_of(parameter).nbytes, _BUCKET_BYTES)
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[int] = []
        """Gradients of each bucket that backward has not computed; empty outside of :meth:`begin` and
        :meth:`finish`."""
        self._started = 0
        self._running: deque[Callable[[], None]] = deque()
        for parameter in (p for p in parameters if hooked and p.requires_grad):
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the sums start in the next backward, which is the last before :meth:`finish`."""
        self._missing, self._started = [sum(p.requires_grad for p in bucket) for bucket in self._buckets], 0

    def finish(self) -> None:
        """Start the remaining sums, and wait for all."""
        while self._started < len(self._buckets):
            self._start()
        while self._running:
            self._running.popleft()()
        self._missing, self._started = [], 0

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._missing:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        self._started += 1
        gradients = [local_of(p.grad) for p in bucket if p.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.numel()]
        if not gradients:
            return
        while len(self._running) >= _IN_FLIGHT:
            self._running.popleft()()
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0] if alone else torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._running.append(partial(_arrive, work, flat, () if alone else gradients))


def _arrive(work: dist.Work | None, flat: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    """Wait for a sum, and copy it from ``flat`` into the gradients."""
    assert work is not None
    work.wait()
    if gradients:
        copy_from_flat(flat, gradients)
