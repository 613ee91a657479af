"""``nxdt train``, killed at any call of its store and started again: it ends as if it had never been interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.ranks import RankPool, RanksFailed

from nxdt_core.checkpoint import load_model, load_optimizer, read_manifest, verify
from tests.faults import whole_run
from tests.faults.deadly import DEATH, ENDPOINT, PLACE
from tests.faults.place import Place
from tests.sampling import takes_all

SAMPLE, FULL_SAMPLE = 1, 20
CASES = [("local", 2), ("s3", 1), ("local", 1), ("s3", 2)]
"""A sample is the first: what a kill leaves on S3 is also shown by ``test_saves.py``."""
TIMEOUT_S = 240.0

Ended = tuple[dict[int, float], dict[str, torch.Tensor]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = random.Random(metafunc.config.getoption("samples"))
    count = FULL_SAMPLE if takes_all(metafunc.config) else SAMPLE
    cases = [(*CASES[number % len(CASES)], chosen.random(), chosen.random()) for number in range(count)]
    metafunc.parametrize(("store", "world", "who", "moment"), cases, ids=[f"{c[0]}-{c[1]}-{c[3]:.3f}" for c in cases])


def run(place: Place, directory: Path, world: int, death: str = "") -> list[int]:
    """Train on ``world`` ranks; returns how often each called the store."""
    environment = {**place.environment, PLACE: place.uri, ENDPOINT: place.endpoint_url, DEATH: death}
    return RankPool(world).run(whole_run.train, str(directory), environment=environment, timeout_s=TIMEOUT_S)


def ended(place: Place, directory: Path) -> Ended:
    """The losses by step, and all tensors of the last checkpoint."""
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    storage = place.open()
    assert verify(storage, whole_run.STEPS) == []
    manifest = read_manifest(storage, whole_run.STEPS)
    optimizer = {f"optimizer {name}": tensor for name, tensor in load_optimizer(storage, manifest).items()}
    return {row["step"]: row["loss"] for row in rows}, {**load_model(storage, manifest), **optimizer}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[list[int], Ended]]:
    """``uninterrupted(world)``: how often each rank called the store, and how the run ended."""

    @cache
    def train(world: int) -> tuple[list[int], Ended]:
        directory = tmp_path_factory.mktemp("uninterrupted")
        place = Place(str(directory / "place"))
        return run(place, directory, world), ended(place, directory)

    return train


def test_a_killed_run_that_starts_again_ends_bit_equal(
    store: str,
    world: int,
    who: float,
    moment: float,
    tmp_path: Path,
    new_place: Callable[..., Place],
    uninterrupted: Any,
    injected: Any,
) -> None:
    calls, (losses, tensors) = uninterrupted(world)
    rank = int(who * world)
    place, death = new_place(store), f"{rank} {int(moment * calls[rank])}"
    with pytest.raises(RanksFailed) as failed:
        run(place, tmp_path, world, death)
    assert failed.value.accounts[rank].startswith("died with exit code -9"), f"{death}: {failed.value}"
    run(place, tmp_path, world)
    found_losses, found = ended(place, tmp_path)
    injected(f"deaths of whole runs on {store}", 1)
    assert found_losses == losses, death
    assert found.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(found[name], tensors[name])] == [], death
