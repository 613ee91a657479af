"""Tokens per second of each layout on two processes with one thread each, compared with one process with two threads.

Claim: two data parallel processes reach at least 0.95 of what two threads of one process do. Same model (15M
parameters), same global batch of 8 x 256 tokens in micro-batches of one sequence, float32 on the CPU, by turns.
Each row gives medians over the rounds: tokens/s of both, their ratio in the same round, and the share of a step during
which a collective or a message was under way, waiting for the other rank included (``torch.profiler``, in
separate steps). Needs two idle cores.

Then the pipeline's bubble: at PP 2 the measured share of a step in which a rank computes nothing, compared with
(p - 1) / (m + p - 1); for more ranks that of the schedule's own list of operations.

    python benchmarks/steps/parallel.py [--rounds 5] [--steps 5] [--only dp2 pp2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from nxdt_testing.ranks import RankPool
from torch.profiler import ProfilerActivity, profile

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.engine.pipeline.schedules import bubble_fraction
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

SEQ, ROWS, VOCAB = 256, 8, 1024
MODEL = [
    "model.num_layers=8",
    "model.hidden_size=384",
    "model.ffn_hidden_size=1024",
    "model.num_attention_heads=6",
    "model.num_kv_heads=6",
    f"model.vocab_size={VOCAB}",
    f"model.max_position_embeddings={SEQ}",
    f"data.seq_length={SEQ}",
    "data.micro_batch_size=1",
]
STRATEGY = "distributed_strategy."
TENSOR = f"{STRATEGY}tensor_model_parallel_size=2"
PIPELINE = f"{STRATEGY}pipeline_model_parallel_size=2"
CONTEXT = f"{STRATEGY}context_parallel_size=2"
LAYOUTS = {
    "dp2": [],
    "dp2 zero 2": [f"{STRATEGY}zero_stage=2"],
    "dp2 zero 3": [f"{STRATEGY}zero_stage=3"],
    "dp2 no zero": [f"{STRATEGY}zero1=false"],
    "tp2": [TENSOR],
    "tp2 sp": [TENSOR, f"{STRATEGY}sequence_parallel=true"],
    "pp2": [PIPELINE],
    "pp2 interleaved": [PIPELINE, f"{STRATEGY}virtual_pipeline_model_parallel_size=2"],
    "pp2 zbv": [PIPELINE, f"{STRATEGY}pipeline_schedule=zbv"],
    "cp2 ring": [CONTEXT, f"{STRATEGY}context_parallel_method=ring"],
    "cp2 gather": [CONTEXT, f"{STRATEGY}context_parallel_method=gather"],
}
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's account of some steps; seconds are medians over them."""

    step_s: float
    busy: float
    """Share of forward and backward in which the main thread computed."""
    communicating: float
    """Share of a step in which a collective or message was under way; 0 where not asked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="LAYOUT")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        print(f"other programs keep {load_before:.1f} cores busy: these figures mean little")
    layouts(options.only, options.rounds, options.steps)
    if "pp2" in options.only:
        bubbles(options.rounds, options.steps)


def layouts(names: list[str], rounds: int, steps: int) -> None:
    """Measure each layout and one process by turns, and print its row."""
    tokens = ROWS * SEQ
    print(f"{'layout':16} {'one process':>12} {'tokens/s':>9} {'ratio':>6} {'communication':>14}   ({rounds} rounds)")
    for name in names:
        alone, two = zip(*(by_turns(LAYOUTS[name], steps, turn) for turn in range(rounds)), strict=True)
        ratio = statistics.median(one / both for one, both in zip(alone, two, strict=True))
        one, both = (tokens / statistics.median(seconds) for seconds in (alone, two))
        share = communication(LAYOUTS[name], steps)
        print(f"{name:16} {one:12.0f} {both:9.0f} {ratio:6.2f} {share:14.0%}", flush=True)


def by_turns(overrides: list[str], steps: int, turn: int) -> tuple[float, float]:
    """Return the seconds of a step of one process and of a layout; which one is first alternates."""
    if turn % 2 == 0:
        first = on_one(steps)
        return first, slowest(on_two(overrides, ROWS, steps))
    last = slowest(on_two(overrides, ROWS, steps))
    return on_one(steps), last


def on_one(steps: int) -> float:
    """Seconds of a step of one process with two threads."""
    (measured,) = RankPool(1).run(measure, [], ROWS, steps, False, threads=2, timeout_s=600)
    return float(measured.step_s)


def bubbles(rounds: int, steps: int) -> None:
    """Print the measured bubble at PP 2 and by the formula, and those of more ranks by their operations."""
    print("\nbubble at PP 2 (1F1B): share of forward and backward in which a rank computes nothing, mean of both ranks")
    for micro_batches in (2, 4, 8, 16):
        runs = [on_two(LAYOUTS["pp2"], micro_batches, steps) for _ in range(rounds)]
        measured = statistics.median(1 - statistics.mean(rank.busy for rank in two) for two in runs)
        print(f"  {micro_batches:2} micro-batches: measured {measured:.3f}, formula {1 / (micro_batches + 1):.3f}")
    print("bubble by the schedule's own operations (backward twice as long as forward, messages free)")
    print(f"  {'ranks':>5} {'micro-batches':>13} {'1f1b':>6} {'interleaved x 2':>15} {'zbv':>6}")
    for ranks in (2, 4, 8):
        for micro_batches in (2 * ranks, 4 * ranks):
            row = [bubble_fraction("1f1b", ranks, 1, micro_batches)]
            row += [bubble_fraction("interleaved", ranks, 2, micro_batches)]
            row += [bubble_fraction("zbv", ranks, 2, micro_batches)]
            print(f"  {ranks:5} {micro_batches:13} {row[0]:6.3f} {row[1]:15.3f} {row[2]:6.3f}")


def on_two(overrides: list[str], rows: int, steps: int, *, profiled: bool = False) -> list[Measured]:
    """Measure a layout on two processes."""
    measured: list[Measured] = RankPool(2).run(measure, overrides, rows, steps, profiled, timeout_s=600)
    return measured


def communication(overrides: list[str], steps: int) -> float:
    """Mean share of both ranks."""
    return statistics.mean(rank.communicating for rank in on_two(overrides, ROWS, steps, profiled=True))


def slowest(two: list[Measured]) -> float:
    """Seconds of a step of both ranks."""
    return max(rank.step_s for rank in two)


def measure(overrides: list[str], rows: int, steps: int, profiled: bool) -> Measured:
    """Train on one repeated batch on each rank; return the times without the first steps."""
    config = configuration(overrides, rows)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    batches = own_batches(rows, engine.rank_info.dp_rank, engine.rank_info.dp_size)

    def step() -> None:
        train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0)

    for _ in range(WARM_UP):
        step()
    walls, shares, busy = [], [], []
    for _ in range(steps):
        meet()
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    for _ in range(steps):
        meet()
        start, thread = time.perf_counter(), time.thread_time()
        model.run_train(batches, objective)
        meet()
        busy.append((time.thread_time() - thread) / (time.perf_counter() - start))
        optimizer.clip_grad_norm(None)
        optimizer.step()
    for _ in range(steps if profiled else 0):
        meet()
        shares.append(communicating(step))
    engine.shutdown()
    return Measured(
        step_s=statistics.median(walls),
        busy=statistics.median(busy),
        communicating=statistics.median(shares) if shares else 0.0,
    )


def communicating(step: Callable[[], object]) -> float:
    """Share of a step during which one of gloo's operations was under way: the union of their intervals."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        step()
        wall_us = (time.perf_counter() - start) * 1e6
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profiler.events() if event.name.startswith("gloo:")
    )
    covered, reached = 0.0, 0.0
    for first, last in spans:
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return covered / wall_us


def configuration(overrides: list[str], rows: int) -> ResolvedConfig:
    """Return the enlarged tiny recipe; steps are driven here, so its data is not read."""
    world = (f"data.global_batch_size={rows}", f"trainer.devices={os.environ['WORLD_SIZE']}", "trainer.accelerator=cpu")
    return load("recipe:llama-tiny", [*MODEL, *world, *overrides])


def own_batches(rows: int, dp_rank: int, dp_size: int) -> list[Batch]:
    """This rank's micro-batches of one sequence each."""
    tokens = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=torch.Generator().manual_seed(0))
    count = rows // dp_size
    own = tokens[dp_rank * count : (dp_rank + 1) * count]
    return [Batch(input_ids=row[None, :-1], labels=row[None, 1:]) for row in own]


def meet() -> None:
    """Let all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
