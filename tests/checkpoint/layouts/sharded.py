"""What ranks do in the tests of sharded checkpoints: hold parts of known tensors in a layout, save, load, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nxdt_core.checkpoint import (
    CheckpointFacts,
    load_model_into,
    load_optimizer_like,
    load_state,
    read_manifest,
)
from nxdt_core.checkpoint.format.shards import storable_shard
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import StorageFull
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import TensorSlice
from tests.checkpoint.saving import save_checkpoint
from tests.error_names import name_of

SHAPES = {
    "embed": (10, 6),  # by rows over tensor parallel ranks, and again, unevenly, over data parallel ones
    "column": (12, 5),
    "row": (6, 8),
    "expert": (4, 3, 2),
    "norm": (7,),
    "one": (1,),
    "scalar": (),
}
PLACEMENTS = {"embed": Shard(0), "column": Shard(0), "row": Shard(1), "expert": Shard(0)}
"""Over tensor parallel ranks; the others lie whole on each."""
STEP = 5


def whole(name: str, offset: float = 0.0) -> torch.Tensor:
    """All elements differ, within a tensor and between tensors."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape) + 1000 * list(SHAPES).index(name) + offset


@dataclass(frozen=True)
class Layout:
    """Sizes; ``pp`` cuts the list of tensors in two."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.replicas

    def names(self, pp_rank: int) -> list[str]:
        return list(SHAPES)[pp_rank * 4 : pp_rank * 4 + 4] if self.pp == 2 else list(SHAPES)


class Holder(nn.Module):
    """Parameters, plain or sharded."""


def parameters(layout: Layout, *, offset: float = 0.0) -> dict[str, torch.Tensor]:
    """This rank's part in ``layout`` of all tensors, as tensor parallelism and ``fully_shard`` leave them."""
    if layout.world == 1:
        return {name: nn.Parameter(whole(name, offset)) for name in SHAPES}
    sizes, dims = (layout.pp, layout.replicas, layout.dp, layout.tp), ("pp", "replicas", "dp", "tp")
    mesh = init_device_mesh(HOST.type, sizes, mesh_dim_names=dims)
    holder = Holder()
    for name in layout.names(mesh.get_local_rank("pp")):
        value = whole(name, offset)
        if layout.tp > 1 and name in PLACEMENTS:
            value = distribute_tensor(value, mesh["tp"], [PLACEMENTS[name]])
        if value.dim() or layout.dp * layout.replicas == 1:  # fully_shard takes no scalars
            holder.register_parameter(name, nn.Parameter(value))
        else:
            holder.register_buffer(name, value)
    if layout.dp * layout.replicas > 1:
        fully_shard(holder, mesh=mesh["replicas", "dp"] if layout.replicas > 1 else mesh["dp"])
    return {**dict(holder.named_parameters()), **dict(holder.named_buffers())}


def optimizer_state(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As an optimizer has it: a moment laid out as its parameter, and a step that is equal everywhere."""
    moments = {f"{name}/exp_avg": tensor.detach().clone() for name, tensor in held.items()}
    for moment in moments.values():  # the local part: sums of DTensors cut twice along a dimension are wrong in 2.9
        local = moment.to_local() if isinstance(moment, DTensor) else moment
        local.add_(0.5).mul_(2)
    return {**moments, **{f"{name}/step": torch.tensor(3.0) for name in held}}


def in_group(work: Callable[[Ranks], Any]) -> Any:
    """Call ``work`` within the process group of the environment."""
    ranks = Ranks.from_environment()
    ranks.start(HOST, timeout_s=30)
    try:
        return work(ranks)
    finally:
        ranks.stop()


def save(ranks: Ranks, storage: CheckpointStore, layout: Layout, **more: Any) -> Any:
    held = parameters(layout)
    state = {"rank": ranks.rank, "rng": torch.full((4,), ranks.rank, dtype=torch.uint8)}
    arguments = {"model": held, "optimizer": optimizer_state(held), "state": state}
    facts = CheckpointFacts(consumed_samples=9)
    return save_checkpoint(storage, step=STEP, facts=facts, ranks=ranks, **{**arguments, **more})


def save_in(layout: Layout, uri: str) -> Any:
    """Save; returns the manifest."""
    return in_group(lambda ranks: save(ranks, LocalStorage(uri), layout))


def load_in(layout: Layout, uri: str) -> list[str]:
    """Load into tensors of other values in ``layout``; returns what came out wrong on this rank."""

    def work(ranks: Ranks) -> list[str]:
        storage = LocalStorage(uri)
        manifest = read_manifest(storage, STEP)
        held = parameters(layout, offset=-77.0)
        load_model_into(storage, manifest, {name: tensor.detach() for name, tensor in held.items()}, ranks=ranks)
        state = load_optimizer_like(storage, manifest, held, ranks=ranks)
        expected = {name: whole(name) for name in held}
        wrong = [f"model {name}" for name, tensor in held.items() if not equal(tensor, expected[name])]
        if state.keys() != optimizer_state(held).keys():
            return [*wrong, f"optimizer has {sorted(state)}"]
        for name, tensor in held.items():
            moment = state[f"{name}/exp_avg"]
            if type(moment) is not type(tensor.detach()) or not equal(moment, (expected[name] + 0.5) * 2):
                wrong.append(f"optimizer {name}")
            if not torch.equal(state[f"{name}/step"], torch.tensor(3.0)):
                wrong.append(f"step of {name}")
        return wrong

    return in_group(work)


def load_states(uri: str) -> dict[str, Any]:
    """This rank's own state."""

    def work(ranks: Ranks) -> dict[str, Any]:
        storage = LocalStorage(uri)
        return load_state(storage, read_manifest(storage, STEP), rank=ranks.rank, ranks=ranks)

    return in_group(work)


def equal(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    value = tensor.detach()
    return torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected)


class FullFrom(LocalStorage):
    """Has no space left for files of one kind on one rank, or meets a bug there."""

    def __init__(self, uri: str, fails: bool, error: Exception) -> None:
        super().__init__(uri)
        self._error = error if fails else None

    def open_write(self, key: str) -> Any:
        if self._error is not None and "shard" in key:
            raise self._error
        return super().open_write(key)


def save_on_full_disk(layout: Layout, uri: str, failing: int, bug: bool) -> tuple[str, str]:
    """Save where one rank fails; returns class and text of this rank's error."""
    error = ZeroDivisionError("boom") if bug else StorageFull(where="disk 3", reason="full")

    def work(ranks: Ranks) -> tuple[str, str]:
        return error_of(lambda: save(ranks, FullFrom(uri, ranks.rank == failing, error), layout))

    return in_group(work)


def save_unsavable(layout: Layout, uri: str, failing: int) -> tuple[str, str]:
    """Save where one rank's state holds an object."""

    def work(ranks: Ranks) -> tuple[str, str]:
        state = {"thing": object() if ranks.rank == failing else 1}
        return error_of(lambda: save(ranks, LocalStorage(uri), layout, state=state))

    return in_group(work)


def save_apart(layout: Layout, uri: str) -> tuple[str, str]:
    """Save where each rank has a disk of its own under the same path."""

    def work(ranks: Ranks) -> tuple[str, str]:
        return error_of(lambda: save(ranks, LocalStorage(f"{uri}-{ranks.rank}"), layout))

    return in_group(work)


def save_different(uri: str) -> tuple[str, str]:
    """Save what the ranks do not agree on."""

    def work(ranks: Ranks) -> tuple[str, str]:
        model = {"w": torch.zeros(2 + ranks.rank)}
        return error_of(lambda: save(ranks, LocalStorage(uri), Layout(), model=model, optimizer={}))

    return in_group(work)


def load_damaged(layout: Layout, uri: str) -> tuple[str, str]:
    """Load where a file is damaged that not every rank reads."""

    def work(ranks: Ranks) -> tuple[str, str]:
        storage = LocalStorage(uri)
        manifest = read_manifest(storage, STEP)
        tensors = {name: tensor.detach() for name, tensor in parameters(layout).items()}
        return error_of(lambda: load_model_into(storage, manifest, tensors, ranks=ranks))

    return in_group(work)


def load_misfits(uri: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Load into a model of other names and shapes, and state of parameters that no rank has."""

    def work(ranks: Ranks) -> tuple[tuple[str, str], tuple[str, str]]:
        storage = LocalStorage(uri)
        manifest = read_manifest(storage, STEP)
        tensors = {name: whole(name) for name in list(SHAPES)[: -1 - ranks.rank]}  # rank 0 lacks scalar, rank 1 more
        if ranks.rank == 1:
            tensors |= {"other": torch.zeros(1), "norm": torch.zeros(8)}
            tensors.pop("embed")
        model = error_of(lambda: load_model_into(storage, manifest, tensors, ranks=ranks))
        optimizer = error_of(lambda: load_optimizer_like(storage, manifest, {"embed": whole("embed")}, ranks=ranks))
        return model, optimizer

    return in_group(work)


def boxes_in(sizes: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    """Compare the box of each kind of piece with the elements that it holds; returns what differs."""

    def work(ranks: Ranks) -> list[str]:
        mesh = init_device_mesh(HOST.type, sizes, mesh_dim_names=names)
        wrong = []
        for text, tensor, source in _pieces(mesh):
            piece = storable_shard(text, tensor)
            if not torch.equal(piece.tensor, source[piece.region.within(TensorSlice.whole(tuple(source.shape)))]):
                wrong.append(f"rank {ranks.rank}: {text}: {piece.region} holds {piece.tensor.tolist()}")
        return wrong

    return in_group(work)


def _pieces(mesh: DeviceMesh) -> Any:
    """(text, DTensor, whole) for placements of one tensor over all dimensions of ``mesh``."""
    kinds = (Replicate(), Shard(0), Shard(1))
    for rows, columns in ((8, 8), (7, 5), (3, 2), (1, 9)):
        source = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        for first in kinds:
            for last in kinds:
                middle = [Replicate()] * (mesh.ndim - 2)
                placements = [first, *middle, last][: mesh.ndim]
                yield f"{placements} of {rows} x {columns}", distribute_tensor(source, mesh, placements), source


def partial_sums() -> tuple[str, str]:
    """A tensor whose sums are still to be made has no values to save."""

    def work(ranks: Ranks) -> tuple[str, str]:
        mesh = init_device_mesh(HOST.type, (dist.get_world_size(),))
        return error_of(lambda: storable_shard("w", DTensor.from_local(torch.ones(2), mesh, [Partial()])))

    return in_group(work)


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """Name and text of what ``action`` raises."""
    with suppress(AssertionError):
        try:
            action()
        except (NxdtError, ZeroDivisionError) as error:
            return name_of(error), str(error)
    return "", ""
