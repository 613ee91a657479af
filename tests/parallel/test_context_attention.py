"""Ring and gathered attention on real ranks against one process: outputs and gradients, with and without documents."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.nn.attention import CausalAttention
from nxdt_core.parallel.context import apply_context_parallel, unshard_sequence
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.zigzag import shard_of
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.testing.ranks import process_group

BATCH, HEADS, SEQ, WIDTH = 2, 4, 48, 8
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 4e-2}
METHODS = ("ring", "gather")


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


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and gradient of the output, [batch, heads, seq, width], laid out as projections leave them."""
    generator = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(BATCH, SEQ, heads, WIDTH, dtype=torch.float64, generator=generator).to(dtype).transpose(1, 2)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def whole(kv_heads: int, document_ids: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of one process, in float64."""
    *qkv, grad = (t.double() for t in inputs(kv_heads, dtype))
    leaves = [t.requires_grad_() for t in qkv]
    output = CausalAttention()(*leaves, document_ids)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def context_mesh() -> ParallelMesh:
    return ParallelMesh.build(MeshSizes(cp=dist.get_world_size()), "cpu")


def sharded_core(mesh: ParallelMesh, method: str) -> nn.Module:
    model = nn.ModuleDict({"core": CausalAttention()})
    apply_context_parallel(model, ParallelPlan(attention_cores=("core",)), mesh, method=method)
    return model["core"]


def on_ranks(cases: list[tuple]) -> list[float]:
    """Largest difference from one process over output and gradients, for each case."""
    with process_group():
        mesh = context_mesh()
        return [difference(mesh, *case) for case in cases]


def difference(mesh: ParallelMesh, method: str, kv_heads: int, packing: str, dtype: torch.dtype) -> float:
    ids = documents(packing)
    shard = functools.partial(shard_of, rank=mesh.rank("cp"), ranks=mesh.size("cp"))
    local_ids = None if ids is None else shard(ids, dim=1)
    core = sharded_core(mesh, method)
    *qkv, grad = (shard(t, dim=2) for t in inputs(kv_heads, dtype))
    leaves = [t.detach().requires_grad_() for t in qkv]
    output = core(*leaves, local_ids)
    output.backward(grad)
    found = [output.detach(), *(t.grad for t in leaves)]
    assert all(t.dtype == dtype for t in found)
    together = [unshard_sequence(t, mesh, dim=2).double() for t in found]
    return max((a - b).abs().max().item() for a, b in zip(together, whole(kv_heads, ids, dtype), strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_is_that_of_one_process(ranks, size, dtype):
    cases = [(*case, dtype) for case in itertools.product(METHODS, (HEADS, 2, 1), DOCUMENTS)]
    for found in ranks(size).run(on_ranks, cases):
        wrong = {case[:3]: error for case, error in zip(cases, found, strict=True) if not error < TOLERANCE[dtype]}
        assert not wrong
