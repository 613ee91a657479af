"""After backward: the sums over ranks that are still missing, and the true norm. No host waits here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.bucketed_sums import by_dtype, sum_over
from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.engine.data.overlapped_sums import OverlappedSums
from nxdt_core.engine.mesh import Dimension, ParallelMesh

__all__ = ["GradientSums", "global_norm"]


class GradientSums:
    """The sums that make every gradient that of the whole global batch: which parameters over which ranks.

    Args:
        parameters: of this rank.
        mesh: of the run.
        tensor_partial: names whose gradient is a partial sum on each tensor parallel rank.
        replica_partial: names of heads that several tensor parallel ranks hold; each has seen its own queries.
        data_reduced: FSDP2 sums over data and context parallel ranks.
        overlapped: without it, let these sums start in the backward that :meth:`begin_last` announces.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        *,
        tensor_partial: Collection[str],
        replica_partial: Collection[str],
        data_reduced: bool,
        overlapped: bool = False,
    ) -> None:
        # In the order of the parameters, which all ranks share: that of a set of names differs between processes.
        chosen: dict[Dimension, list[nn.Parameter]] = {}
        self._data: list[OverlappedSums] = []
        if not data_reduced:
            experts = {name for name, parameter in parameters.items() if "ep" in sharded_over(parameter)}
            dense = [parameter for name, parameter in parameters.items() if name not in experts]
            of_experts = [parameter for name, parameter in parameters.items() if name in experts]
            for group, summed in ((mesh.group("fsdp"), dense), (mesh.group("efsdp"), of_experts)):
                if group is not None and summed:
                    self._data.append(OverlappedSums(group, summed, hooked=overlapped))
            chosen["dp_replicate"] = list(parameters.values())
        chosen["tp"] = [parameter for name, parameter in parameters.items() if name in tensor_partial]
        chosen["tp_kv_replica"] = [parameter for name, parameter in parameters.items() if name in replica_partial]
        self._sums = [(mesh.group(dimension), summed) for dimension, summed in chosen.items() if summed]

    def begin_last(self) -> None:
        """Let sums over data parallel ranks start in the backward that comes: no other adds to its gradients."""
        for sums in self._data:
            sums.begin()

    def add_up(self) -> None:
        """Sum each gradient over the ranks of its group, in place."""
        for sums in self._data:
            sums.finish()
        for group, parameters in self._sums:
            if group is not None:
                sum_over(group, [local_of(p.grad) for p in parameters if p.grad is not None])


def global_norm(
    tensors: Iterable[torch.Tensor | None],
    world: dist.ProcessGroup | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the 2-norm of all gradients, or of all weights, over all ranks and stages, each element counted once.

    Args:
        tensors: of those parameters whose elements this rank speaks for (:func:`nxdt_core.engine.parameters.owns`).
        world: all ranks; None for one that is alone.
        device: of the result.
        dtype: of the result and of its summation, the same on all ranks.

    Returns:
        A device scalar, equal on all ranks bit for bit.
    """
    held = [local_of(tensor.detach()) for tensor in tensors if tensor is not None]
    norms = [norm for same in by_dtype(held) for norm in torch._foreach_norm(same, 2, dtype)]
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device, dtype=dtype)
    if world is not None:
        dist.all_reduce(squares, group=world)
    return squares.sqrt()
