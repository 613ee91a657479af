"""Ranks that hold the same parameters read a checkpoint once among them, and each gets the very same bytes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.distributed import devices
from nxdt_core.distributed.placement import local_of
from nxdt_core.protocols.tensor_shards import LocalShard
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.calls import Call, in_turn
from tests.engine.matrix.batches import global_batch, share
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import configuration
from tests.sampling import asked, slow_except

LAYOUTS = {
    "whole on each rank": (Layout(dp=2, zero=0), 1),
    "replicas of shards": (Layout(dp=4, replicas=2), 2),
    "experts over ranks": (Layout(dp=2, ep=2, zero=0, moe=True), 2),
    "sharded": (Layout(dp=2), 2),
}
"""Layout, and the ranks that read tensors."""


class Counting(LocalStorage):
    """Counts the openings of files of tensors."""

    opened = 0

    def open_read(self, key, start=0, length=None):
        self.opened += "/state/" not in key and "shard-" in key
        return super().open_read(key, start, length)


def elements(state):
    return {
        name: (value.tensor if isinstance(value, LocalShard) else local_of(value)).clone()
        for name, value in state.items()
    }


def save_and_load(layout, uri):
    """Train two steps and save; load into a fresh model. What was there, what came back, and whether this rank read."""
    profile = replace(devices.PROFILES["cpu"], broadcast_loads=True)
    with mock.patch.dict(devices.PROFILES, {"cpu": profile}):
        config = configuration(layout, "float64")
        engine = build.engine(config)
        engine.start()
        model = initialize_parallel_model(config, engine)
        optimizer = initialize_parallel_optimizer(config, engine, model)
        state, place = TrainState(), engine.rank_info
        batches = share(global_batch(packed=False), place.dp_rank, place.dp_size)
        objective, schedule = build.objective(config), build.schedule(config)
        for _ in range(2):
            train_step(model, optimizer, batches, objective, schedule, state)
        TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).save(LocalStorage(uri))
        before = elements(model.state_dict()), elements(optimizer.state_dict())
        store = Counting(uri)
        model = initialize_parallel_model(config, engine, materialise=False)
        optimizer = initialize_parallel_optimizer(config, engine, model)
        TrainSession(config, engine=engine, model=model, optimizer=optimizer).load_checkpoint(
            store, read_manifest(store, 2)
        )
        after = elements(model.state_dict()), elements(optimizer.state_dict())
        engine.shutdown()
    return before, after, store.opened > 0


def all_layouts(layouts):
    return in_turn([Call(layout.world, save_and_load, (layout, uri)) for layout, uri in layouts])


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """By layout, what each of its ranks reports; layouts of as many ranks share their processes."""
    named = [name for name in LAYOUTS if name in asked(request, "name")]
    reports = {}
    for world in {LAYOUTS[name][0].world for name in named}:
        names = [name for name in named if LAYOUTS[name][0].world == world]
        layouts = [(LAYOUTS[name][0], str(tmp_path_factory.mktemp("replicas"))) for name in names]
        by_rank = RankPool(world).run(all_layouts, layouts, timeout_s=240)
        reports |= dict(zip(names, zip(*by_rank, strict=True), strict=True))
    return reports


@pytest.mark.parametrize("name", slow_except(LAYOUTS, ("experts over ranks", "sharded")))
def test_one_of_them_reads(found, name):
    _, readers = LAYOUTS[name]
    reports = found[name]
    for before, after, _ in reports:
        for saved, found in zip(before, after, strict=True):
            assert saved.keys() == found.keys()
            assert all(torch.equal(saved[key], found[key]) for key in saved)
    assert sum(read for *_, read in reports) == readers
