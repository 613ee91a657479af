"""What ranks do in the tests of the door to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nxdt_core.checkpoint import read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.dcp import NxdtReader, NxdtWriter
from nxdt_core.distributed.process_group import Ranks
from tests.checkpoint.layouts.sharded import STEP, Layout, equal, in_group, optimizer_state, parameters, whole


def read_in(layout: Layout, uri: str) -> list[str]:
    """``dcp.load`` into tensors of other values in ``layout``; returns what came out wrong on this rank."""

    def work(ranks: Ranks) -> list[str]:
        held = {name: tensor.detach() for name, tensor in parameters(layout, offset=-77.0).items()}
        moments = {name: torch.zeros_like(tensor) for name, tensor in optimizer_state(held).items()}
        load(held, storage_reader=reader(uri))
        load(moments, storage_reader=reader(uri, "optim"))
        expected = {name: whole(name) for name in held}
        wrong = [name for name, tensor in held.items() if not equal(tensor, expected[name])]
        state = optimizer_state(expected)
        return wrong + [name for name, tensor in moments.items() if not equal(tensor, state[name])]

    return in_group(work)


def write_in(layout: Layout, uri: str) -> None:
    """``dcp.save`` of the tensors that :func:`tests.checkpoint.layouts.sharded.save_in` saves."""

    def work(ranks: Ranks) -> None:
        held = {name: tensor.detach() for name, tensor in parameters(layout).items()}
        save(held, storage_writer=NxdtWriter(LocalStorage(uri), STEP))

    in_group(work)


def refused_in(layout: Layout, uri: str, failing: int) -> str:
    """The text of what ``dcp.save`` raises on this rank where one rank has something that is no tensor."""

    def work(ranks: Ranks) -> str:
        held: dict[str, object] = {name: tensor.detach() for name, tensor in parameters(layout).items()}
        if ranks.rank == failing:
            held["epoch"] = 3
        try:
            save(held, storage_writer=NxdtWriter(LocalStorage(uri), STEP))
        except CheckpointException as error:
            return str(error)
        return ""

    return in_group(work)


def error_in(layout: Layout, uri: str) -> str:
    """The text of what ``dcp.load`` raises on this rank."""

    def work(ranks: Ranks) -> str:
        held = {name: tensor.detach() for name, tensor in parameters(layout).items()}
        try:
            load(held, storage_reader=reader(uri))
        except CheckpointException as error:
            return str(error)
        return ""

    return in_group(work)


def reader(uri: str, section: str = "model") -> NxdtReader:
    storage = LocalStorage(uri)
    return NxdtReader(storage, read_manifest(storage, STEP), section)
