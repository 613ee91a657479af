"""Masters of weights that one rank has alone: what a step moves for them, and what stays of it between steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxdt_core.distributed.devices import PROFILES
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data.fsdp import WeightStorage
from nxdt_core.engine.precision import CopiedMasters
from nxdt_core.models.loss import CausalLM
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy
from tests.engine.test_traffic import MICRO_BATCHES, ROWS, SEQ, configured, running

MASTERS = PrecisionPolicy(name="mixed_precision", parameters="bfloat16", master_weights=True)
CASTS = {"_to_copy", "copy_", "_foreach_copy_", "add_", "div", "chunk_cat"}
"""Operators by which weights and gradients go from one dtype or buffer to another."""


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors of some shapes that operators read and write."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self._shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.bytes[func._opname] += sum(leaf.nbytes for leaf in leaves if tuple(leaf.shape) in self._shapes)
        return result


def moved_by_casts(precision: str, *overrides: str) -> tuple[float, bool, bool, set[str]]:
    """Bytes for each element of the layers' matrices in a step; whether there is a process group, and whether FSDP2 is
    at work; the dtypes that the modules have after it."""
    with running(configured("llama-tiny", precision, 1, *overrides)) as (_, model, step):
        step()
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        (module,) = model.local_modules()
        with Moved({tuple(p.shape) for p in matrices}) as moved:
            step()
        total = sum(size for name, size in moved.bytes.items() if name in CASTS)
        dtypes = {str(parameter.dtype) for parameter in module.parameters()}
        sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        return total / sum(p.numel() for p in matrices), dist.is_initialized(), sharded, dtypes


@pytest.mark.parametrize("precision", ["mixed_precision", "autocast"])
def test_one_rank_casts_each_master_once_and_each_gradient_into_its_sum(new_ranks, precision):
    ((moved, grouped, sharded, dtypes),) = new_ranks(1).run(moved_by_casts, precision, timeout_s=240)
    weights, first, later = 4 + 2, 2 + 4, 2 + 4 + 4
    assert moved == weights + first + (MICRO_BATCHES - 1) * later
    assert (grouped, sharded, dtypes) == (False, False, {"torch.float32"})


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [
        (MeshSizes(), True),
        (MeshSizes(tp=4), True),
        (MeshSizes(dp_shard=2), False),
        (MeshSizes(cp=2), False),
        (MeshSizes(pp=2), False),
    ],
    ids=str,
)
def test_masters_that_others_hold_too_or_in_a_pipeline_are_sharded(sizes, copied):
    storage = WeightStorage.of(sizes, MASTERS)
    assert (storage.copied, storage.sharded) == (copied, not copied)


@pytest.mark.parametrize("stay", [False, True])
def test_copies_are_those_of_the_masters_now_and_keep_their_memory_for_recordings(stay: bool) -> None:
    layer = torch.nn.Linear(3, 3)
    copies = CopiedMasters([layer], layer.parameters(), torch.bfloat16)
    copies.stay = stay
    with copies.in_place():
        copy, address = layer.weight, layer.weight.data_ptr()
    assert bool(copy.untyped_storage().nbytes()) == stay
    with torch.no_grad():
        layer.weight.mul_(2)
    master = layer.weight
    with copies.in_place():
        assert torch.equal(layer.weight, master.bfloat16())
        assert not stay or layer.weight.data_ptr() == address


def gradients_of_a_step(recipe: str, world: int, casts_once: bool, *overrides: str) -> tuple[int, dict[str, Any]]:
    """The number of weights that have a copy, and the gradients of a step over several micro-batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROFILES, "cpu", replace(PROFILES["cpu"], compile_backend="aot_eager"))  # type: ignore[arg-type]
        if not casts_once:
            of = WeightStorage.of
            patch.setattr(WeightStorage, "of", lambda *args, **sizes: replace(of(*args, **sizes), cast_once=False))
        with running(configured(recipe, "autocast", world, *overrides)) as (_, model, _):
            ids = torch.randint(200, (ROWS, SEQ), generator=torch.Generator().manual_seed(3))
            batches = [Batch(input_ids=rows, labels=rows) for rows in (ids, ids.flip(0), ids.flip(1))]
            model.run_train(batches, CausalLM())
            gradients = {name: local_of(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
            return len(model._products._pairs) if model._products else 0, gradients


def gradients_of_both(recipe: str, world: int, *overrides: str) -> list[tuple[int, dict[str, Any]]]:
    """``gradients_of_a_step`` of weights that are cast once per step, and of those that each product casts."""
    return [gradients_of_a_step(recipe, world, casts_once, *overrides) for casts_once in (True, False)]


TP = ("distributed_strategy.tensor_model_parallel_size=2", "distributed_strategy.sequence_parallel=true")


@pytest.mark.parametrize(
    ("recipe", "world", "copied", "overrides"),
    [
        ("llama-tiny", 1, True, ()),
        ("llama-tiny", 1, True, ("model.compile=true",)),
        ("llama-tiny", 1, True, ("model.compile=true", "model.activations_checkpoint_granularity=full")),
        ("llama-tiny", 1, True, ("model.loss_chunk_tokens=8",)),
        ("mixtral-tiny", 1, True, ("model.compile=true",)),
        ("llama-tiny", 2, True, (*TP, "model.compile=true")),
        ("llama-tiny", 2, False, ("model.compile=true",)),
    ],
    ids=str,
)
def test_weights_cast_once_per_step_give_the_gradients_of_those_cast_by_each_product(
    new_ranks, recipe, world, copied, overrides
):
    ranks = new_ranks(world).run(gradients_of_both, recipe, world, *overrides, timeout_s=300)
    for (copies, gradients), (none, expected) in ranks:
        assert (copies > 0, none) == (copied, 0)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
