"""The time of a step by a product's data sheet, against values derived by hand."""

import pytest

from nxdt_core.distributed.devices import PROFILES, Links
from nxdt_core.protocols.estimate import Estimate, Memory, RankEstimate
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train.plan import link_rate, step_time

LINKS = Links(processes=8, inside=400.0, outside=50.0)


def estimated(sent, *, bubble=0.0, recomputed=0.0, hidden_behind=(), never_hidden=(), ranks=1):
    """1,000 tokens of 16 operations each, over ``ranks`` places in the pipeline that send ``sent`` bytes each."""
    return Estimate(
        parameters=1,
        trained=1,
        micro_batches=4,
        tokens_per_step=1000,
        bubble=bubble,
        checkpoint_bytes=0,
        flops_per_token=16.0,
        layout=(),
        recomputed=recomputed,
        hidden_behind=dict(hidden_behind),
        never_hidden=dict(never_hidden),
        ranks=tuple(
            RankEstimate(pp_rank=rank, stages=(rank,), layers=1, parameters=1, stored=1, memory=Memory(), sent=sent)
            for rank in range(ranks)
        ),
    )


def test_computation_is_operations_over_the_peak_that_kernels_reach():
    time = step_time(estimated({}), MeshSizes(dp_shard=4), peak_flops=100.0, links=LINKS, efficiency=0.5)
    assert time.compute == time.total == pytest.approx(16_000 / 4 / 50)
    assert time.tokens_per_second == pytest.approx(250 / 80)
    assert time.mfu == pytest.approx(0.5)


def test_recomputation_takes_time_and_counts_not_as_work_of_the_model():
    time = step_time(estimated({}, recomputed=1 / 3), MeshSizes(), peak_flops=100.0, links=LINKS, efficiency=0.5)
    assert time.compute == pytest.approx(4 / 3 * 320)
    assert time.mfu == pytest.approx(0.5 * 3 / 4)


def test_a_pipeline_waits_for_its_share_of_the_whole_step():
    time = step_time(estimated({}, bubble=0.2), MeshSizes(pp=2), peak_flops=100.0, links=LINKS, efficiency=0.5)
    assert time.waiting / time.total == pytest.approx(0.2)


@pytest.mark.parametrize(("share", "exposed"), [(0.0, 100.0), (0.25, 60.0), (1.0, 0.0)])
def test_traffic_counts_as_far_as_it_is_not_hidden(share, exposed):
    """100 s on the wire, 160 s of computation."""
    found = estimated({"tp": 40_000}, hidden_behind={"tp": share})
    time = step_time(found, MeshSizes(tp=2), peak_flops=100.0, links=LINKS, efficiency=0.5)
    assert time.exposed["tp"] == pytest.approx(exposed)
    assert time.total == pytest.approx(160 + exposed)


@pytest.mark.parametrize(("share", "exposed"), [(0.25, 60.0), (0.5, 25.0), (1.0, 25.0)])
def test_a_part_of_the_traffic_is_never_hidden(share, exposed):
    """100 s on the wire, of which a quarter comes before any computation that could hide it."""
    found = estimated({"ep": 40_000}, hidden_behind={"ep": share}, never_hidden={"ep": 0.25})
    time = step_time(found, MeshSizes(dp_shard=2, ep=2), peak_flops=50.0, links=LINKS, efficiency=1.0)
    assert time.compute == pytest.approx(160)
    assert time.exposed["ep"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("dimension", "sizes", "rate"),
    [
        ("tp", MeshSizes(tp=8), 400),
        ("tp", MeshSizes(tp=16), 400),  # leaves a machine through all its adapters
        ("dp", MeshSizes(tp=2, dp_shard=4), 400),
        ("dp", MeshSizes(tp=8, dp_shard=4), 50),
        ("dp", MeshSizes(tp=4, dp_shard=4), 100),
        ("cp", MeshSizes(tp=4, cp=2), 400),
        ("cp", MeshSizes(tp=8, cp=2), 50),
        ("ep", MeshSizes(dp_shard=16, ep=8), 400),
        ("pp", MeshSizes(tp=8, pp=2), 50),
        ("pp", MeshSizes(tp=2, pp=4), 400),
    ],
)
def test_a_group_is_as_fast_as_the_links_between_its_machines(dimension, sizes, rate):
    assert link_rate(dimension, sizes, LINKS) == rate


def test_products_with_links_have_a_memory_and_a_peak():
    for profile in PROFILES.values():
        assert profile.links.keys() <= profile.memory_gib.keys()
        assert profile.links.keys() <= profile.peak_flops.keys()
        assert all(links.inside >= links.outside for links in profile.links.values())
