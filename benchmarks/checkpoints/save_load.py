"""Seconds of saves and loads compared with the disk and with torch, and the cost of a background save for training.

Claims, on an idle machine with two cores: a save runs at no less than 0.8 of the disk's sequential write with fsync,
and is no slower than ``torch.save`` with fsync; a load is at least as fast as ``torch.load``; a save in the background
holds training for at most 0.1 of what a save at once takes, slows the next ten steps by at most 0.1, and takes at most
one more copy of the state in memory; digests cost less than 0.05 of a save (they are computed during the write, so what
they cost is the difference to a save without; in memory, where a save is fastest). Speeds of disks vary fourfold from
minute to minute, so everything is measured by turns: each figure is a median over the rounds, each ratio the median of
the ratios within a round. A round of 1.2 GB takes half a minute on a slow disk.

    python benchmarks/checkpoints/save_load.py [--gigabytes 1.2] [--rounds 5] [--directory .]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager, load_model_into, read_manifest
from nxdt_core.checkpoint.format.shards import bytes_of
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.run.callbacks.checkpoints import STEPS
from tests.checkpoint.saving import save_checkpoint

TENSOR_BYTES = 32 * 2**20
MEMORY = Path("/dev/shm")
FIGURES = ("raw write", "torch.save", "save", "torch.load", "load", "in the background", "blocked")
State = dict[str, torch.Tensor]


class Resident:
    """Greatest growth of the process's memory within a block, sampled every 5 ms."""

    def __enter__(self) -> Resident:
        gc.collect()
        self._before, self.peak_bytes, self._done = _resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, _resident() - self._before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@contextmanager
def folder(root: Path) -> Iterator[Path]:
    """Provide a directory that is deleted afterwards; older writes are flushed first."""
    os.sync()
    path = Path(tempfile.mkdtemp(dir=root, prefix="benchmark-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def write_raw(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            file.write(bytes_of(tensor))
        os.fsync(file.fileno())


def write_torch(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_ours(state: State, path: Path) -> None:
    save_checkpoint(LocalStorage(str(path)), step=1, model=state, optimizer={}, state={}, facts=CheckpointFacts())


def read_torch(state: State, path: Path) -> None:
    torch.load(path, weights_only=True)


def read_ours(state: State, path: Path) -> None:
    """Into tensors that exist, as a run resumes."""
    storage = LocalStorage(str(path))
    load_model_into(storage, read_manifest(storage, 1), state)


def parts(state: State) -> tuple[State, State]:
    """Return a state of which a third is weights and the rest optimizer state."""
    names = list(state)
    cut = len(names) // 3
    return {n: state[n] for n in names[:cut]}, {n: state[n] for n in names[cut:]}


class NoDigest:
    """In the place of the digest, for a save without."""

    def update(self, data: memoryview) -> None:
        pass

    def reset(self) -> None:
        pass

    def hexdigest(self) -> str:
        return 32 * "0"


def write_undigested(state: State, path: Path) -> None:
    with mock.patch("nxdt_core.checkpoint.format.manifest.xxh3_128", NoDigest):
        write_ours(state, path)


def digests(state: State, number: int) -> dict[str, float]:
    """Return the seconds of a save with digests and of one without, on a memory file system if there is one."""
    found = {}
    ways = [("digested", write_ours), ("undigested", write_undigested)]
    for name, write in ways[number % 2 :] + ways[: number % 2]:
        with folder(MEMORY if MEMORY.is_dir() else Path()) as path:
            found[name] = seconds(lambda: write(state, path / "there"))  # noqa: B023  (called at once)
    return found


def files(state: State, root: Path, number: int) -> dict[str, float]:
    """Writing and reading by turns, another one first in each round; seconds."""
    found = digests(state, number)
    turns = [("raw write", write_raw, None), ("torch.save", write_torch, read_torch), ("save", write_ours, read_ours)]
    for name, write, read in turns[number % 3 :] + turns[: number % 3]:
        with folder(root) as path:
            found[name] = seconds(lambda: write(state, path / "there"))  # noqa: B023  (called at once)
            if read is not None:
                found[name.replace("save", "load")] = seconds(lambda: read(state, path / "there"))  # noqa: B023
    return found


def step(weights: torch.Tensor) -> None:
    """Work for all cores, as a step on the host is."""
    for _ in range(4):
        weights @ weights


def background(state: State, root: Path, manager: CheckpointManager, number: int) -> dict[str, float]:
    """One save in the background between steps; seconds, and the slowdown of the steps after it."""
    weights = torch.ones(1024, 1024)
    before_s = sum(seconds(lambda: step(weights)) for _ in range(STEPS))
    after_s = 0.0
    model, optimizer = parts(state)
    with Resident() as memory:
        begun = time.perf_counter()
        manager.save(step=number, model=model, optimizer=optimizer, state={}, facts=CheckpointFacts())
        blocked_s = time.perf_counter() - begun
        for _ in range(STEPS):
            after_s += seconds(lambda: step(weights))
            manager.poll()
        manager.wait()
    return {
        "blocked": blocked_s,
        "in the background": time.perf_counter() - begun,
        "slowdown": after_s / before_s - 1,
        "memory": memory.peak_bytes / sum(tensor.nbytes for tensor in state.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path())
    arguments = parser.parse_args()
    count = max(3, round(arguments.gigabytes * 1e9 / TENSOR_BYTES))
    state = {f"layers.{i}.weight": torch.randn(TENSOR_BYTES // 4 // 1024, 1024) for i in range(count)}
    rows: list[dict[str, float]] = []
    with folder(arguments.directory) as path:
        manager = CheckpointManager(LocalStorage(str(path)), refuse_same_weights=False, after_commit=_forget(path))
        for number in range(arguments.rounds + 1):  # the first takes the memory for copies, and warms all else
            rows.append({**files(state, arguments.directory, number), **background(state, path, manager, number)})
    size = sum(tensor.nbytes for tensor in state.values())
    first, rest = rows[0], rows[1:]
    print(f"{size / 1e9:.2f} GB of state, medians of {len(rest)} rounds")
    for name in FIGURES:
        spent = statistics.median(row[name] for row in rest)
        print(f"  {name:<20}{spent:>9.3f} s{size / spent / 1e9:>8.2f} GB/s")
    print("ratios")
    for text, ratio, wanted in RATIOS:
        values = sorted(ratio(row) for row in rest)
        print(f"  {text:<58}{statistics.median(values):>7.3f}  ({values[0]:.3f} to {values[-1]:.3f}; wanted {wanted})")
    print(
        f"first save in the background: {first['blocked']:.3f} s blocked, {first['memory']:.2f} of the state in memory"
    )


RATIOS: list[tuple[str, Callable[[Mapping[str, float]], float], str]] = [
    ("speed of a save to a raw write with fsync", lambda row: row["raw write"] / row["save"], "at least 0.8"),
    ("speed of a save to torch.save with fsync", lambda row: row["torch.save"] / row["save"], "at least 1"),
    ("speed of a load to torch.load", lambda row: row["torch.load"] / row["load"], "at least 1"),
    ("blocked by a background save to a save at once", lambda row: row["blocked"] / row["save"], "at most 0.1"),
    ("next ten steps to those before", lambda row: 1 + row["slowdown"], "at most 1.1"),
    ("a save to one without digests", lambda row: row["digested"] / row["undigested"], "below 1.05"),
    ("more memory to the state, copies being there", lambda row: row["memory"], "at most 0.05"),
]


def _forget(path: Path) -> Callable[[Any], object]:
    """Keep the newest only."""

    def forget(manifest: Any) -> None:
        for each in path.glob("step-*"):
            if each.name != f"step-{manifest.step:08d}":
                shutil.rmtree(each)

    return forget


if __name__ == "__main__":
    main()
