"""``parallel_state``: each rank's place, and groups whose collectives reach the ranks that they list."""

import os

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
import torch.distributed as dist
from nxdt_plugin_nxd_core import parallel_state
from nxdt_testing.ranks import RankPool

from nxdt_core.errors import NxdtError
from tests.calls import Call, run_in_turn

DIMENSIONS = ("tensor_model", "data", "pipeline_model")


def ask(dimension, what, *arguments):
    return getattr(parallel_state, f"get_{dimension}_parallel_{what}")(*arguments)


def places(config):
    nxd_config = nxd.neuronx_distributed_config(**config)
    found = {}
    for dimension in DIMENSIONS:
        ranks = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(ranks, group=ask(dimension, "group"))
        listed = ask(dimension, "group", True)
        assert listed == ask(dimension, "replica_groups")
        (own,) = [group for group in listed if dist.get_rank() in group]
        assert own[ask(dimension, "rank")] == dist.get_rank()
        assert len(own) == ask(dimension, "size")
        assert int(ranks) == sum(2**rank for rank in own)
        found[dimension] = listed
    during = parallel_state.model_parallel_is_initialized()
    nxd_config.engine.shutdown()
    return (during, parallel_state.model_parallel_is_initialized()), found


CONFIGS = {
    "tp2": ({"tensor_parallel_size": 2},),
    "pp2": ({"pipeline_parallel_size": 2, "pipeline_config": {"num_microbatches": 2}},),
}


@pytest.fixture(scope="module")
def found_on_ranks():
    """What four ranks found in one layout after the other."""
    return run_in_turn({layout: Call(4, places, arguments) for layout, arguments in CONFIGS.items()})


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("tp2", ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]])),
        ("pp2", ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]])),
    ],
)
def test_groups_are_those_of_the_layout(found_on_ranks, layout, groups):
    for initialized, found in found_on_ranks[layout]:
        assert initialized == (True, False), "while the process group exists, and once it has ended"
        assert tuple(found.values()) == groups


def alone():
    """Without a launcher, unlike under torchrun, where a single process has a process group, too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(NxdtError, match=r"NXDT-T064.*neuronx_distributed_config"):
        parallel_state.get_data_parallel_size()
    nxd_config = nxd.neuronx_distributed_config()
    found = [ask(dimension, "group", as_list) for dimension in DIMENSIONS for as_list in (False, True)]
    counts = [
        getattr(parallel_state, f"get_{dimension}_model_parallel_{what}")()
        for dimension in ("context", "expert")
        for what in ("size", "rank")
    ]
    nxd_config.engine.shutdown()
    return found, counts


def test_one_process_has_lists_and_no_groups():
    assert RankPool(1).run(alone) == [([None, [[0]]] * 3, [1, 0] * 2)]
