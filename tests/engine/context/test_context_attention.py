"""Ring and gathered attention on real ranks against one process: outputs and gradients, with and without documents."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import process_group
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nxdt_core.engine.context.attention import apply_context_parallel, unshard_sequence
from nxdt_core.engine.context.blocks import zigzag_shard
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.models.attention.sinks import SinkAttention
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from tests.at_rest import at_rest
from tests.sampling import slow, slow_except

BATCH, HEADS, SEQ, WIDTH = 2, 4, 48, 8
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}
METHODS = ("ring", "gather")
EACH = [(size, dtype) for size in (2, 3, 4) for dtype in TOLERANCE]
KEPT = [(2, torch.float64), (3, torch.float32), (2, torch.bfloat16)]
"""Each type once; three ranks pass on more than once."""


def documents(name: str) -> torch.Tensor | None:
    """Ids [batch, seq] of packed documents; padding is −1."""
    if name == "none":
        return None
    lengths = {
        # Borders inside chunks, documents over several chunks, padding at the end of one row.
        "packed": ((5, 20, 1, 11, 11), (48,)),
        # Borders on those of the chunks of 2 and of 4 ranks, and one document that fills whole chunks.
        "aligned": ((12, 12, 24), (24, 12, 12)),
        # Chunks that share nothing with any earlier one; a row of padding only.
        "short": ((6,) * 8, ()),
    }[name]
    rows = []
    for row in lengths:
        ids = [document for document, length in enumerate(row) for _ in range(length)]
        rows.append(ids + [-1] * (SEQ - len(ids)))
    if name == "packed":
        rows[0][-6:] = [-1] * 6
    return torch.tensor(rows)


DOCUMENTS = ("none", "packed", "aligned", "short")
WINDOWS = (1, 5, 12, 30)
"""Within a chunk of 2 and of 4 ranks, as long as one, over several."""


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and gradient of the output, [batch, heads, seq, width], laid out as projections leave them."""
    generator = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(BATCH, SEQ, heads, WIDTH, dtype=torch.float64, generator=generator).to(dtype).transpose(1, 2)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def whole(
    kv_heads: int, document_ids: torch.Tensor | None, dtype: torch.dtype, window: int | None
) -> list[torch.Tensor]:
    """Output and gradients of one process, in float64."""
    *qkv, grad = (t.double() for t in inputs(kv_heads, dtype))
    leaves = [t.requires_grad_() for t in qkv]
    output = CausalAttention(window=window)(*leaves, document_ids)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def context_mesh() -> ParallelMesh:
    return ParallelMesh.build(MeshSizes(cp=dist.get_world_size()), "cpu")


def sharded_core(mesh: ParallelMesh, method: str, window: int | None = None) -> nn.Module:
    model = nn.ModuleDict({"core": CausalAttention(window=window)})
    apply_context_parallel(model, ParallelPlan(attention_cores=("core",)), mesh, method=method)
    return model["core"]


def on_ranks(cases: list[tuple]) -> list[float]:
    """Largest difference from one process over output and gradients, for each case."""
    with process_group():
        mesh = context_mesh()
        return [difference(mesh, *case) for case in cases]


def difference(
    mesh: ParallelMesh, method: str, kv_heads: int, packing: str, dtype: torch.dtype, window: int | None = None
) -> float:
    ids = documents(packing)
    shard = functools.partial(zigzag_shard, rank=mesh.rank("cp"), ranks=mesh.size("cp"))
    local_ids = None if ids is None else shard(ids, dim=1)
    core = sharded_core(mesh, method, window)
    *qkv, grad = (shard(t, dim=2) for t in inputs(kv_heads, dtype))
    leaves = [t.detach().requires_grad_() for t in qkv]
    output = core(*leaves, local_ids)
    output.backward(grad)
    found = [output.detach(), *(t.grad for t in leaves)]
    assert all(t.dtype == dtype for t in found)
    together = [unshard_sequence(t, mesh, dim=2).double() for t in found]
    return max((a - b).abs().max().item() for a, b in zip(together, whole(kv_heads, ids, dtype, window), strict=True))


@pytest.mark.parametrize(("size", "dtype"), slow_except(EACH, KEPT), ids=str)
def test_attention_is_that_of_one_process(ranks, size, dtype):
    cases = [(*case, dtype) for case in itertools.product(METHODS, (HEADS, 2, 1), DOCUMENTS)]
    for found in ranks(size).run(on_ranks, cases):
        wrong = {case[:3]: error for case, error in zip(cases, found, strict=True) if not error < TOLERANCE[dtype]}
        assert not wrong


@pytest.mark.parametrize("size", [2, slow(4)])
def test_windows_are_those_of_one_process(ranks, size):
    cases = [
        (*case, torch.float64, window) for case in itertools.product(METHODS, (2,), DOCUMENTS) for window in WINDOWS
    ]
    for found in ranks(size).run(on_ranks, cases):
        wrong = {case: error for case, error in zip(cases, found, strict=True) if not error < 1e-11}
        assert not wrong


def sinks_on_ranks() -> list[float]:
    """Differences from one process with a sink per head: of output, gradients of the tokens, and that of the sinks."""
    with process_group():
        mesh, ids = context_mesh(), documents("packed")
        shard = functools.partial(zigzag_shard, rank=mesh.rank("cp"), ranks=mesh.size("cp"))
        found = []
        for method, window in itertools.product(METHODS, (None, 12)):
            *qkv, grad = inputs(2, torch.float64)
            sinks = torch.tensor([-1.0, 0.5, 2.0, 5.0], dtype=torch.float64)
            leaves = [t.clone().requires_grad_() for t in (*qkv, sinks)]
            expected = SinkAttention(window=window)(*leaves[:3], ids, sinks=leaves[3])
            expected.backward(grad)
            local = [t.clone().requires_grad_() for t in (*(shard(t, dim=2) for t in qkv), sinks)]
            output = sharded_core(mesh, method, window)(*local[:3], shard(ids, dim=1), sinks=local[3])
            output.backward(shard(grad, dim=2))
            dist.all_reduce(local[3].grad, group=mesh.group("cp"))
            pairs = [(output, shard(expected, dim=2)), (local[3].grad, leaves[3].grad)]
            pairs += [(mine.grad, shard(each.grad, dim=2)) for mine, each in zip(local[:3], leaves[:3], strict=True)]
            found.append(max((mine - each).abs().max().item() for mine, each in pairs))
        return found


def test_sinks_are_those_of_one_process(ranks):
    for found in ranks(2).run(sinks_on_ranks):
        assert max(found) < 1e-11


def under_autocast() -> list[tuple[torch.dtype, float]]:
    """Dtype of the output, and its largest difference from one process, by method; the rotation of a model of
    transformers makes queries and keys float32, and values are bfloat16."""
    with process_group(), torch.autocast("cpu", torch.bfloat16):
        mesh, found = context_mesh(), []
        query, key, value, _ = inputs(2, torch.float32)
        expected = CausalAttention()(query, key, value.bfloat16())
        shard = functools.partial(zigzag_shard, dim=2, rank=mesh.rank("cp"), ranks=mesh.size("cp"))
        for method in METHODS:
            output = sharded_core(mesh, method)(shard(query), shard(key), shard(value).bfloat16())
            found.append((output.dtype, float((output - shard(expected)).abs().max())))
        return found


def test_autocast_rounds_what_it_rounds_in_one_process(ranks):
    for found in ranks(2).run(under_autocast):
        for dtype, difference in found:
            assert dtype == torch.bfloat16
            assert difference < TOLERANCE[dtype]


def awkward_inputs(method: str) -> dict[str, float]:
    """Differences from one process for values of another width, odd strides, a gradient that is one number."""
    with process_group():
        mesh = context_mesh()
        core, shard = sharded_core(mesh, method), functools.partial(zigzag_shard, rank=mesh.rank("cp"), ranks=2, dim=2)
        found = {}
        for name, value_width in (("wide values", 12), ("strides", WIDTH)):
            query, key, value, _ = inputs(2, torch.float64)
            value = value.repeat(1, 1, 1, 2)[..., :value_width]
            leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
            expected = CausalAttention()(*leaves)
            expected.sum().backward()
            local = [
                shard(t).transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for t in (query, key, value)
            ]
            output = core(*local)
            output.sum().backward()
            pairs = [(output, expected), *((mine.grad, whole.grad) for mine, whole in zip(local, leaves, strict=True))]
            found[name] = max((mine - shard(whole)).abs().max().item() for mine, whole in pairs)
        return found


@pytest.mark.parametrize("method", METHODS)
def test_widths_and_strides_do_not_matter(ranks, method):
    for found in ranks(2).run(awkward_inputs, method):
        assert found == pytest.approx({"wide values": 0, "strides": 0}, abs=1e-11)


def recomputed(method: str) -> bool:
    with process_group():
        mesh = context_mesh()
        core, local = sharded_core(mesh, method), []
        for call in (core, functools.partial(checkpoint, core, use_reentrant=False)):
            *qkv, grad = (zigzag_shard(t, mesh.rank("cp"), 2, 2) for t in inputs(2, torch.float32))
            leaves = [t.requires_grad_() for t in qkv]
            call(*leaves, zigzag_shard(documents("packed"), mesh.rank("cp"), 2, 1)).backward(grad)
            local.append([t.grad for t in leaves])
        return all(torch.equal(a, b) for a, b in zip(*local, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_gives_the_same_gradients(ranks, method):
    assert ranks(2).run(recomputed, method) == [True, True]


class Sizes(TorchDispatchMode):
    """Shapes of all floating-point tensors that operations return, and which of their storages live on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.Size] = set()
        self._storages: list[tuple[int, StorageWeakRef]] = []

    def living(self) -> int:
        """Bytes of the largest storage that is still there."""
        return max(size for size, storage in self._storages if not storage.expired())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.seen.add(tensor.shape)
                self._storages.append((tensor.untyped_storage().nbytes(), StorageWeakRef(tensor.untyped_storage())))
        return result


def held(method: str) -> tuple[list[tuple[int, ...]], int, set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Shapes that autograd saves, bytes of the largest tensor that outlives forward, and shapes that appear at any time
    in forward and in backward."""
    saved: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with process_group():
        mesh = context_mesh()
        core = sharded_core(mesh, method)
        *qkv, grad = (zigzag_shard(t, mesh.rank("cp"), mesh.size("cp"), 2) for t in inputs(2, torch.float32))
        leaves = [t.requires_grad_() for t in qkv]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Sizes() as forward:
            output = core(*leaves)
        living = at_rest(forward.living)
        with Sizes() as backward:
            output.backward(grad)
    return saved, living, {tuple(s) for s in forward.seen}, {tuple(s) for s in backward.seen}


@pytest.fixture(scope="module")
def held_by(ranks):
    """``held_by(method)``: of each of three ranks; each method runs once."""
    return functools.cache(lambda method: ranks(3).run(held, method))


@pytest.mark.parametrize("method", METHODS)
def test_shards_alone_are_kept_for_backward(held_by, method):
    local = SEQ // 3
    for saved, living, _, _ in held_by(method):
        shared = (BATCH, 2, local, WIDTH)
        own = (BATCH, HEADS, local, WIDTH)
        assert sorted(saved) == sorted([own, shared, shared, own, own[:3]])  # query, key, value, output, log-sum-exp
        assert living == torch.Size(own).numel() * 4  # the output; nor is anything larger kept in another way


def test_the_ring_never_holds_a_whole_sequence(held_by):
    for _, _, forward, backward in held_by("ring"):
        shard = BATCH * HEADS * (SEQ // 3) * WIDTH  # as many as of key and value together
        for shape in forward | backward:
            assert SEQ not in shape, shape
            assert torch.Size(shape).numel() <= shard, shape
    for _, _, forward, backward in held_by("gather"):  # which shows that they would be seen
        assert any(SEQ in shape for shape in forward)
        assert any(SEQ in shape for shape in backward)
