"""Claim: from 2,048 tokens on, the way to share a sequence that the profile names costs no more than the other one.

Forward and backward of one attention core on ranks of this machine, by turns: ring gather, gather ring, … Each row
gives the median of the paired ratios ring / gather and their quartiles, in wall time of the slower rank and in CPU time
of all ranks; above 1, gathering is quicker. The last column is what the ranks of the quicker one spend together over
what one process spends on the whole sequence.

    python benchmarks/models/context.py [--ranks 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from nxdt_testing.ranks import RankPool, process_group
from torch import nn

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.context.attention import apply_context_parallel
from nxdt_core.engine.context.blocks import zigzag_shard
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan

METHODS = ("ring", "gather")
Times = dict[str, list[tuple[float, float]]]
"""Method → (wall, CPU) seconds of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one micro-batch's attention."""

    seq: int
    heads: int = 8
    kv_heads: int = 2
    width: int = 64
    documents: int = 1


SHAPES = {
    "512 tokens": Shape(seq=512),
    "2,048 tokens": Shape(seq=2048),
    "4,096 tokens": Shape(seq=4096),
    "2,048 tokens, all heads": Shape(seq=2048, kv_heads=8),
    "4,096 tokens in 8 documents": Shape(seq=4096, documents=8),
}


def main() -> int:
    """Print the table; status 1 where the profile's method costs a tenth more CPU time than the other, at 2,048 tokens
    or more. (Wall times of several ranks on a shared machine vary by a factor of two.)"""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    chosen = profile_of(HOST).context_parallel_method
    print(f"chosen for this device: {chosen}")
    slower = False
    for name, shape in SHAPES.items():
        by_rank = RankPool(options.ranks).run(measure, shape, options.rounds, timeout_s=600)
        ratio = report(name, by_rank, one_process(shape))
        slower |= shape.seq >= 2048 and (ratio if chosen == "ring" else 1 / ratio) > 1.1
    return int(slower)


def report(name: str, by_rank: list[Times], alone_s: float) -> float:
    """Print a row, return the median ratio of CPU times."""
    wall = {
        m: [max(rank[0] for rank in ranks) for ranks in zip(*(t[m] for t in by_rank), strict=True)] for m in METHODS
    }
    cpu = {m: [sum(rank[1] for rank in ranks) for ranks in zip(*(t[m] for t in by_rank), strict=True)] for m in METHODS}
    parts, medians = [], []
    for seconds in (wall, cpu):
        low, median, high = statistics.quantiles(
            [ring / gather for ring, gather in zip(seconds["ring"], seconds["gather"], strict=True)], n=4
        )
        parts.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
        medians.append(median)
    total = min(statistics.median(cpu[method]) for method in METHODS)
    wall_ms = " ".join(f"{method} {statistics.median(wall[method]) * 1e3:.1f}" for method in METHODS)
    print(
        f"{name:30} ring / gather: wall {parts[0]}, CPU {parts[1]}; wall ms: {wall_ms}; "
        f"CPU of all ranks / of one process {total / alone_s:.2f}",
        flush=True,
    )
    return medians[-1]


def measure(shape: Shape, rounds: int) -> Times:
    """Return the seconds of each round on one rank."""
    with process_group(timeout_s=120):
        mesh = ParallelMesh.build(MeshSizes(cp=dist.get_world_size()), HOST.type)
        place = {"rank": mesh.rank("cp"), "ranks": mesh.size("cp")}
        *inputs, ids = tensors(shape)
        local = [zigzag_shard(tensor, **place, dim=2) for tensor in inputs]
        local_ids = None if ids is None else zigzag_shard(ids, **place, dim=1)
        cores = {method: core(mesh, method) for method in METHODS}
        times: Times = {method: [] for method in METHODS}
        for turn in range(-2, rounds):
            for method in METHODS if turn % 2 else METHODS[::-1]:
                dist.barrier()
                seconds = timed(cores[method], local, local_ids)
                if turn >= 0:  # the first two are for caches and connections
                    times[method].append(seconds)
        return times


def core(mesh: ParallelMesh, method: str) -> nn.Module:
    """Return a core that attends over ``mesh``."""
    model = nn.ModuleDict({"core": CausalAttention()})
    apply_context_parallel(model, ParallelPlan(attention_cores=("core",)), mesh, method=method)
    return model["core"]


def tensors(shape: Shape) -> tuple[torch.Tensor | None, ...]:
    """Query, key, value, gradient of the output; document ids or None."""
    torch.manual_seed(0)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ids = None
    if shape.documents > 1:
        ids = torch.arange(shape.seq).mul(shape.documents).div(shape.seq, rounding_mode="floor")[None]
    return *(torch.randn(1, shape.seq, n, shape.width).transpose(1, 2) for n in counts), ids


def timed(attend: nn.Module, local: list[torch.Tensor], ids: torch.Tensor | None) -> tuple[float, float]:
    """Wall and CPU seconds of forward and backward."""
    *qkv, grad = local
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    wall, cpu = time.perf_counter(), time.process_time()
    attend(*leaves, ids).backward(grad)
    return time.perf_counter() - wall, time.process_time() - cpu


def one_process(shape: Shape) -> float:
    """CPU seconds of the whole sequence in one process, the median of five."""
    torch.set_num_threads(1)
    *inputs, ids = tensors(shape)
    return statistics.median(timed(CausalAttention(), inputs, ids)[1] for _ in range(5))


if __name__ == "__main__":
    sys.exit(main())
