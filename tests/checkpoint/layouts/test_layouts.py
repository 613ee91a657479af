"""A run that stops in one layout goes on in another as if it had never stopped."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.calls import Call, in_turn
from tests.engine.matrix.batches import global_batch, share
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import configuration, whole
from tests.sampling import asked, slow_except

STEPS = 2
"""Before and after the stop: the second step after it has gradients of what the loaded optimizer state changed."""

CHANGES = {
    "sharded weights to one process": (Layout(dp=2, zero=3), Layout()),
    "one process to tensor and sequence parallel": (Layout(), Layout(tp=2, sp=True)),
    "a pipeline with tied layers to data parallel": (
        Layout(pp=2, zbv=True, tied=True),
        Layout(dp=2, zero=3, tied=True),
    ),
    "copied key heads to a pipeline": (Layout(tp=4), Layout(pp=2, vpp=2)),
    "experts over ranks to experts over columns": (Layout(dp=2, ep=2, moe=True), Layout(tp=2, moe=True)),
    "shards of shards to one process": (Layout(dp=2, tp=2, zero=3), Layout()),
    "the same layout": (Layout(dp=2), Layout(dp=2)),
}
KEPT = {
    "a pipeline with tied layers to data parallel",
    "experts over ranks to experts over columns",
}


def run(layout: Layout, uri: str | None, *, resumes: bool, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, from the checkpoint at ``uri`` if ``resumes``, otherwise to one there; losses and whole weights."""
    config = configuration(layout, "float64")
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine, materialise=not resumes)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    state = TrainState()
    if resumes:
        assert uri is not None
        storage = LocalStorage(uri)
        manifest = read_manifest(storage, STEPS)
        extra = TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).load_checkpoint(
            storage, manifest
        )
        assert extra == {"note": "kept"}
        assert state.step == STEPS
    place = engine.rank_info
    batches = share(global_batch(packed=False), place.dp_rank, place.dp_size)
    objective, schedule, losses = build.objective(config), build.schedule(config), []
    for _ in range(steps):
        result = train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0)
        losses.append(float(result.loss.loss))
    if uri is not None and not resumes:
        TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).save(
            LocalStorage(uri), extra={"note": "kept"}
        )
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    engine.shutdown()
    return losses, weights


def in_layout(layout, uri, resumes, steps):
    return run(layout, uri, resumes=resumes, steps=steps)


def all_changes(changes):
    """Make the runs of each change one after the other, each on the first of these ranks."""
    calls = []
    for before, after, uri in changes:
        calls += [
            Call(before.world, in_layout, (before, uri, False, STEPS)),
            Call(after.world, in_layout, (after, uri, True, STEPS)),
            Call(1, in_layout, (before.one_process, None, False, 2 * STEPS)),
        ]
    return in_turn(calls)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """By change, what the ranks of its three runs return; changes of as many ranks share their processes."""
    pools = defaultdict(list)
    for change in (change for change in CHANGES if change in asked(request, "change")):
        worlds = {layout.world for layout in CHANGES[change]}
        pools[max(worlds), change if len(worlds - {1}) > 1 else ""].append(change)
    found = {}
    for (world, _), changes in pools.items():
        runs = [(*CHANGES[change], str(tmp_path_factory.mktemp("layouts") / "store")) for change in changes]
        reports = RankPool(world).run(all_changes, runs, timeout_s=300)
        for place, change in enumerate(changes):
            sizes = [*(layout.world for layout in CHANGES[change]), 1]
            found[change] = [
                [report[3 * place + number] for report in reports[:size]] for number, size in enumerate(sizes)
            ]
    return found


@pytest.mark.parametrize("change", slow_except(CHANGES, KEPT))
def test_a_run_goes_on_in_another_layout(outcomes, change):
    first, second, ((losses, weights),) = outcomes[change]
    for rank in second:
        assert first[0][0] + rank[0] == pytest.approx(losses, abs=1e-9)
    resumed = {name: weight for _, held in second for name, weight in held.items()}
    assert resumed.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-9, msg=name)
