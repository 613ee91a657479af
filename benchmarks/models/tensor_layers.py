"""Claim: at sizes that people train, our tensor parallel layers cost no more than those of ``parallelize_module``.

Forward and backward of decoder layers on two processes of this machine, one thread each, float32, by turns: ours
torch, torch ours, … Torch's layers get the plan that torchtitan has for Llama: one ``PrepareModuleInput`` per block,
column and row parallel projections with local outputs, and ``SequenceParallel`` norms with sequence parallelism. Each
row gives the median of the paired ratios torch / ours and their quartiles, in wall time of the slower rank and in CPU
time of both; above 1, ours are quicker. Takes about a minute on two quiet cores.

    python benchmarks/models/tensor_layers.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from nxdt_testing.ranks import RankPool, process_group
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nxdt_core.distributed.devices import HOST
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.apply import apply_tensor_parallel
from nxdt_core.protocols.mesh import MeshSizes

RANKS = 2
KINDS = ("ours", "torch")
Times = dict[str, list[tuple[float, float]]]
"""Kind of layers → (wall, CPU) seconds of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One micro-batch of one sequence."""

    hidden: int
    seq: int
    layers: int = 1
    sequence_parallel: bool = False


CASES = tuple(
    Case(hidden=hidden, seq=seq, layers=layers, sequence_parallel=sequence_parallel)
    for hidden, seq, layers in ((256, 256, 4), (1024, 512, 2), (1024, 2048, 1), (2048, 512, 1))
    for sequence_parallel in (False, True)
)


def main() -> int:
    """Print a row per case; status 1 where ours cost a tenth more CPU time at a hidden size from 1,024 on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    slower = False
    pool = RankPool(RANKS)
    for case in CASES:
        ratio = report(case, pool.run(measure, case, options.rounds, timeout_s=600))
        slower |= case.hidden >= 1024 and ratio < 0.9
    return int(slower)


def report(case: Case, by_rank: list[Times]) -> float:
    """Print the ratios of a case, and return the median one of CPU times."""
    rounds = {kind: list(zip(*(times[kind] for times in by_rank), strict=True)) for kind in KINDS}
    wall = {kind: [max(wall for wall, _ in ranks) for ranks in rounds[kind]] for kind in KINDS}
    cpu = {kind: [sum(cpu for _, cpu in ranks) for ranks in rounds[kind]] for kind in KINDS}
    texts, medians = [], []
    for name, seconds in (("wall", wall), ("CPU", cpu)):
        ratios = [theirs / ours for theirs, ours in zip(seconds["torch"], seconds["ours"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        texts.append(f"{name} {median:.2f} ({low:.2f} to {high:.2f})")
        medians.append(median)
    print(
        f"hidden {case.hidden:5} seq {case.seq:5} layers {case.layers} {'SP' if case.sequence_parallel else '  '}  "
        f"torch / ours: {', '.join(texts)}; CPU seconds of ours {statistics.median(cpu['ours']):.3f}",
        flush=True,
    )
    return medians[-1]


def measure(case: Case, rounds: int) -> Times:
    """Return the seconds of each round on one rank."""
    torch.set_num_threads(1)
    with process_group(timeout_s=300):
        mesh = ParallelMesh.build(MeshSizes(tp=RANKS), HOST.type)
        models = {kind: sharded(case, mesh, kind) for kind in KINDS}
        local = case.seq // RANKS if case.sequence_parallel else case.seq
        torch.manual_seed(dist.get_rank() if case.sequence_parallel else 0)
        hidden, grad = torch.randn(2, 1, local, case.hidden)
        angles = torch.outer(torch.arange(case.seq).float(), torch.rand(case.hidden // 16))[None, :, None]
        rotary = angles[..., :32].cos(), angles[..., :32].sin()  # heads are 64 wide
        times: Times = {kind: [] for kind in KINDS}
        outputs = {}
        for turn in range(-1, rounds):
            for kind in KINDS if turn % 2 else KINDS[::-1]:
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                output = hidden.requires_grad_()
                for layer in models[kind].children():
                    output = layer(output, rotary, None, None)
                output.backward(grad)
                if turn >= 0:  # the first is for caches and connections
                    times[kind].append((time.perf_counter() - wall, time.process_time() - cpu))
                outputs[kind] = output.detach()
        torch.testing.assert_close(outputs["ours"], outputs["torch"], rtol=1e-3, atol=1e-3)
        return times


def sharded(case: Case, mesh: ParallelMesh, kind: str) -> nn.Module:
    """Return the decoder layers, sharded over ``mesh``; the same weights for each kind."""
    config = LlamaConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=case.hidden * 11 // 4,
        num_attention_heads=case.hidden // 64,
        vocab_size=64,
    )
    builder = LlamaBuilder(config)
    torch.manual_seed(0)
    module = builder.build()
    if kind == "ours":
        whole = nn.ModuleDict({"layers": module.layers})
        apply_tensor_parallel(whole, builder.plan(), mesh, sequence_parallel=case.sequence_parallel)
        return whole["layers"]
    for layer in module.layers.values():
        parallelize_module(layer, mesh.mesh("tp"), torch_plan(sequence_parallel=case.sequence_parallel))
    return module.layers


def torch_plan(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return torchtitan's plan for a layer of Llama, under our names."""
    between = Shard(1) if sequence_parallel else Replicate()
    norms = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")} if sequence_parallel else {}
    return {
        **norms,
        "attention": PrepareModuleInput(
            input_layouts=(between, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }


if __name__ == "__main__":
    raise SystemExit(main())
