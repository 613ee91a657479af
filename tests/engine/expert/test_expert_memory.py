"""Experts that no other rank has are in memory once: FSDP2 has nothing to gather."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.tensor import DTensor

from nxdt_core.engine.data.fsdp import WeightStorage
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model
from tests.engine.test_traffic import HIDDEN, LAYERS, MICRO_BATCHES, ROWS, SEQ, STRATEGY, configured

FFN, EXPERTS = 64, 4


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def expert_bytes_in_forward() -> int:
    """Storages of matrices of experts on this rank, while the model's head runs."""
    experts = (f"{STRATEGY}expert_model_parallel_size=2", f"model.moe.num_experts={EXPERTS}")
    config = configured("mixtral-tiny", "fp32", 2, *experts)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    found: list[int] = []
    matrices = {(EXPERTS // 2, FFN, HIDDEN), (EXPERTS // 2, HIDDEN, FFN)}

    def count(*_: object) -> None:
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tuple(tensor.shape) in matrices]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in whole}
        found.append(sum(storages.values()))

    (module,) = model.local_modules()
    module.get_submodule("lm_head").register_forward_pre_hook(count)
    ids = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    model.run_train([Batch(input_ids=ids, labels=ids)] * (MICRO_BATCHES // 2), build.objective(config))
    engine.shutdown()
    return found[0]


def test_a_rank_holds_its_experts_once(ranks):
    once = LAYERS * 3 * EXPERTS // 2 * FFN * HIDDEN * 4
    assert ranks(2).run(expert_bytes_in_forward, timeout_s=240) == [once, once]


def test_experts_that_other_ranks_have_too_or_with_masters_are_sharded():
    policy = PrecisionPolicy(name="autocast", autocast="bfloat16")
    assert WeightStorage.of(MeshSizes(dp_shard=4, ep=4), policy).experts_whole
    assert not WeightStorage.of(MeshSizes(dp_shard=4, ep=2), policy).experts_whole
    assert not WeightStorage.of(MeshSizes(dp_shard=2, dp_replicate=2, ep=2), policy).experts_whole
    assert not WeightStorage.of(MeshSizes(dp_shard=4), policy).experts_whole
    masters = PrecisionPolicy(name="masters", parameters="bfloat16", master_weights=True)
    assert not WeightStorage.of(MeshSizes(dp_shard=4, ep=4), masters).experts_whole
