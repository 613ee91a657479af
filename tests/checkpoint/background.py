"""What ranks do in the tests of saves in the background."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.errors.checkpoints import StorageFull
from tests.checkpoint.layouts import sharded
from tests.checkpoint.layouts.sharded import Layout, error_of, in_group

LIMIT_S = 30.0


class Gated(LocalStorage):
    """Does not finish a shard while the gate is closed."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.gate = threading.Event()
        self.gate.set()

    def open_write(self, key: str) -> Any:
        assert self.gate.wait(LIMIT_S), "nobody opened the gate"
        return super().open_write(key)


def begin(
    manager: CheckpointManager, step: int, value: float = 0.0, *, asynchronous: bool = True, **facts: Any
) -> bool:
    """Begin a save of one tensor that is ``value`` everywhere, and of one of each rank."""
    return manager.save(
        step=step,
        model={"w": torch.full((8,), value)},
        optimizer={},
        state={"own": torch.tensor([step])},  # a shard on every rank
        facts=CheckpointFacts(updates=step, **facts),
        asynchronous=asynchronous,
    )


def poll_until(manager: CheckpointManager, ended: Any) -> int:
    """Poll as a loop over steps does; returns the number of steps until ``ended()``."""
    for steps in range(1, 10_000):
        manager.poll()
        if ended():
            return steps
        time.sleep(0.01)
    raise AssertionError("the save has not ended")


def save_sharded(layout: Layout, uri: str) -> list[int]:
    """Save tensors in ``layout``, change them at once, and save again; returns the steps that were told."""

    def work(ranks: Ranks) -> list[int]:
        told: list[int] = []
        manager = CheckpointManager(
            LocalStorage(uri), ranks=ranks, on_saved=lambda report: told.append(report.manifest.step)
        )
        for step in (sharded.STEP, sharded.STEP + 1):
            held = {name: tensor.detach() for name, tensor in sharded.parameters(layout).items()}
            optimizer = sharded.optimizer_state(held)
            manager.save(
                step=step, model=held, optimizer=optimizer, state={"rank": ranks.rank}, facts=CheckpointFacts()
            )
            with torch.no_grad():
                for tensor in (*held.values(), *optimizer.values()):
                    tensor.mul_(-3.0)
        manager.wait()
        return told

    return in_group(work)


class FullOn(LocalStorage):
    """Has no space left for shards on one rank."""

    def __init__(self, uri: str, full: bool) -> None:
        super().__init__(uri)
        self.full = full

    def open_write(self, key: str) -> Any:
        if self.full and "shard" in key:
            raise StorageFull(where="disk 3", reason="full")
        return super().open_write(key)


def fail_and_go_on(uri: str) -> dict[str, Any]:
    """A save that fails on rank 1, seen while the ranks go on at different paces; then one that works."""

    def work(ranks: Ranks) -> dict[str, Any]:
        storage = FullOn(uri, full=False)
        manager = CheckpointManager(storage, ranks=ranks)
        begin(manager, 1, 1.0)
        manager.wait()
        storage.full = ranks.rank == 1
        begin(manager, 2, 2.0)
        error, step = ("", ""), 2
        while not error[0]:
            step += 1
            time.sleep(0.05 * ranks.rank)
            error = error_of(manager.poll)
        storage.full = False
        begin(manager, step, 3.0)
        manager.wait()
        return {"error": error, "step": step}

    return in_group(work)


def skip_when_busy(uri: str) -> list[bool]:
    """Saves at every step while rank 1's store is slow, until one is begun again."""

    def work(ranks: Ranks) -> list[bool]:
        storage = Gated(uri)
        manager = CheckpointManager(storage, ranks=ranks, when_busy="skip")
        begun: list[bool] = []
        for step in range(1, 200):
            if sum(begun) > 1:  # the same on all ranks, or the test fails
                break
            if ranks.rank == 1 and step == 1:
                storage.gate.clear()
            if ranks.rank == 1 and step == 5:
                storage.gate.set()
            manager.poll()
            begun.append(begin(manager, step, float(step)))
            time.sleep(0.2)
        manager.wait()
        return begun

    return in_group(work)


def hang(uri: str, deadline_s: float) -> dict[str, Any]:
    """Rank 1's store never answers."""

    def work(ranks: Ranks) -> dict[str, Any]:
        storage = Gated(uri)
        first = CheckpointManager(storage, ranks=ranks)  # without the short deadline, which a busy machine misses
        begin(first, 1, 1.0)
        first.wait()
        manager = CheckpointManager(storage, ranks=ranks, deadline_s=deadline_s)
        if ranks.rank == 1:
            storage.gate.clear()
        begin(manager, 2, 2.0)
        begun = time.monotonic()
        error, steps = ("", ""), 0
        while not error[0] and time.monotonic() < begun + 20 * deadline_s:
            steps += 1
            time.sleep(0.02)
            error = error_of(manager.poll)
        return {"error": error, "steps": steps}

    # What hangs cannot be left in order: the pool ends the processes.
    ranks = Ranks.from_environment()
    ranks.start(HOST, timeout_s=LIMIT_S)
    return work(ranks)


def save_what_changes(uri: str) -> None:
    """What is held changes between saves: on one rank only, then everywhere."""

    def work(ranks: Ranks) -> None:
        manager = CheckpointManager(LocalStorage(uri), ranks=ranks)
        first = {"w": torch.arange(4.0)}
        second = first if ranks.rank == 0 else {**first, "mine": torch.arange(3.0)}
        third = {"w": torch.arange(6.0)}
        for step, model in enumerate((first, first, second, third), start=1):
            manager.save(step=step, model=model, optimizer={}, state={}, facts=CheckpointFacts())
        manager.wait()

    in_group(work)
