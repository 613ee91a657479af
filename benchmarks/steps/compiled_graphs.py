"""What ``model.compile`` makes of a run: graphs, breaks, recompilations, and on an accelerator kernel launches.

Claim: a run has one graph for each kind of layer in training and one in validation, two of the loss, none breaks, and
after the first step and the first validation none is added; status 1 where that does not hold. Documents have other
borders at every step. Launches are those of one step and its validation.

    python benchmarks/steps/compiled_graphs.py [--steps 20] [--backend aot_eager] [CASE …]

Cases with several ranks start them on this machine (gloo). ``aot_eager`` counts as ``inductor`` does and needs no
compiler; launches need ``inductor``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from nxdt_testing.ranks import RankPool
from torch.profiler import ProfilerActivity, profile

from nxdt_core.config import load
from nxdt_core.distributed.devices import PROFILES, profile_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.graph_counts import GraphCounts

_SEQUENCE, _ROWS = 64, 2
_MOE = {"model.moe.num_experts": 4}
_SELECTIVE = {
    "model.activations_checkpoint_granularity": "selective",
    "model.activations_checkpoint_recompute": "[CoreAttention]",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, by keys of its configuration."""

    keys: Mapping[str, Any]
    recipe: str = "llama-tiny"
    ranks: int = 1
    graphs: int = 4
    """One in training, one in validation and two of the loss; with LoRA the first layer has its own, since no gradient
    leaves it."""


CASES = {
    "dense": Case(keys={}),
    "LoRA": Case(keys={"adapter.name": "lora", "adapter.target_modules": "[all-linear]"}, graphs=5),
    "MoE, capacity": Case(recipe="mixtral-tiny", keys={**_MOE, "model.moe.capacity_factor": 1.25}),
    "MoE, dropless": Case(recipe="mixtral-tiny", keys={**_MOE, "model.moe.capacity_factor": 0}),
    "recomputed layers": Case(keys={"model.activations_checkpoint_granularity": "full"}),
    "recomputed attention": Case(keys=_SELECTIVE),
    "CP 2": Case(keys={"distributed_strategy.context_parallel_size": 2}, ranks=2),
    "EP 2, dropless": Case(
        recipe="mixtral-tiny",
        keys={**_MOE, "model.moe.capacity_factor": 0, "distributed_strategy.expert_model_parallel_size": 2},
        ranks=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    graphs: int
    breaks: int
    recompilations: int
    late: int
    launches: int | None


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--backend", default="aot_eager")
    options = parser.parse_args()
    holds = True
    print(f"{'':22} graphs  breaks  recompilations  after the first  launches")
    for name in options.cases:
        case = CASES[name]
        arguments = (case, options.steps, options.layers, options.backend)
        row = RankPool(case.ranks).run(count, *arguments, timeout_s=600)[0] if case.ranks > 1 else count(*arguments)
        launches = "-" if row.launches is None else str(row.launches)
        print(f"{name:22} {row.graphs:6} {row.breaks:7} {row.recompilations:15} {row.late:16} {launches:>9}")
        holds = holds and (row.graphs, row.breaks, row.late) == (case.graphs, 0, 0)
    return int(not holds)


def count(case: Case, steps: int, layers: int, backend: str) -> Row:
    """Train and validate by turns; a function of a pool of ``case.ranks`` ranks."""
    torch._dynamo.reset()
    for kind, device_profile in list(PROFILES.items()):
        PROFILES[kind] = replace(device_profile, compile_backend=backend)  # type: ignore[index]
    keys = {
        "model.compile": "true",
        "model.num_layers": layers,
        "trainer.devices": case.ranks,
        "data.seq_length": _SEQUENCE,
        "data.micro_batch_size": _ROWS,
        "data.global_batch_size": 2 * _ROWS * case.ranks,
        **case.keys,
    }
    config = load(f"recipe:{case.recipe}", [f"{key}={value}" for key, value in keys.items()])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    late = GraphCounts()
    own = 2 * case.ranks // engine.rank_info.dp_size

    def step(number: int) -> None:
        batches = [packed_batch(number * 100 + engine.rank_info.dp_rank * own + index) for index in range(own)]
        train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0)
        model.run_eval(batches, objective)

    with GraphCounts() as counts:
        step(0)
        with late:
            for number in range(1, steps):
                step(number)
    launches = None if profile_of(engine.device).host else launched(lambda: step(steps))
    engine.shutdown()
    return Row(
        graphs=counts.graphs,
        breaks=counts.breaks,
        recompilations=counts.recompilations,
        late=late.graphs + late.recompilations,
        launches=launches,
    )


def launched(step: Callable[[], None]) -> int:
    """Kernels that ``step`` starts."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())


def packed_batch(seed: int) -> Batch:
    """Return a micro-batch with its own document borders."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (_ROWS, _SEQUENCE + 1), generator=random)
    starts = torch.rand(_ROWS, _SEQUENCE, generator=random) < 0.1
    starts[:, 0] = True
    places = torch.arange(_SEQUENCE).expand(_ROWS, _SEQUENCE)
    return Batch(
        input_ids=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        position_ids=places - torch.where(starts, places, 0).cummax(1).values,
        document_ids=starts.long().cumsum(1) - 1,
    )


if __name__ == "__main__":
    sys.exit(main())
