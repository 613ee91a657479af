"""Seconds per step of ``nxdt train`` in two working trees, such as two commits, by turns.

Claim: a change that was not made for the speed of a CPU costs none. Each tree needs a virtual environment of its own in
``.venv``, as ``make install`` leaves it. Each case trains a few steps in both trees, in alternating order, and takes
the median of the run's own ``step_time_s`` without the first steps. Rows give the medians over the rounds, and the
median, least and largest ratio of a round: above 1, the second tree is faster. Needs two idle cores.

    python benchmarks/steps/working_trees.py ../before . [--rounds 5] [--steps 12] [--only dp2 tp2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

STRATEGY = "distributed_strategy."
LLAMA = [
    "recipe:llama-tiny",
    "model.num_layers=8",
    "model.hidden_size=384",
    "model.ffn_hidden_size=1024",
    "model.num_attention_heads=6",
    "model.num_kv_heads=6",
    "model.max_position_embeddings=256",
    "data.seq_length=256",
    "data.micro_batch_size=1",
    "data.global_batch_size=8",
]
MIXTRAL = [
    "recipe:mixtral-tiny",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.max_position_embeddings=256",
    "data.seq_length=256",
    "data.micro_batch_size=2",
    "data.global_batch_size=8",
]
CHATS = [
    "recipe:llama-tiny-sft",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=768",
    "model.max_position_embeddings=512",
    "data.seq_length=512",
    "data.micro_batch_size=2",
    "data.global_batch_size=8",
]
TWO = "trainer.devices=2"
TENSOR = [TWO, f"{STRATEGY}tensor_model_parallel_size=2"]
EXPERTS = [TWO, f"{STRATEGY}expert_model_parallel_size=2"]
CASES = {
    "one process": LLAMA,
    "dp2": [*LLAMA, TWO],
    "dp2 zero 3": [*LLAMA, TWO, f"{STRATEGY}zero_stage=3"],
    "tp2": [*LLAMA, *TENSOR],
    "tp2 sp": [*LLAMA, *TENSOR, f"{STRATEGY}sequence_parallel=true"],
    "tp2 autocast": [*LLAMA, *TENSOR, "precision.type=autocast"],
    "pp2": [*LLAMA, TWO, f"{STRATEGY}pipeline_model_parallel_size=2"],
    "ep2": [*MIXTRAL, *EXPERTS],
    "ep2 dropless": [*MIXTRAL, *EXPERTS, "model.moe.capacity_factor=null"],
    "packed chats": CHATS,
}
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        print(f"other programs keep {load_before:.1f} cores busy: these figures mean little")
    print(
        f"{'case':14} {'before ms':>9} {'after ms':>9} {'ratio':>6} {'least':>6} {'most':>6}  ({options.rounds} rounds)"
    )
    for case in options.only:
        rounds = [both(options.before, options.after, case, options.steps, turn) for turn in range(options.rounds)]
        before, after = (statistics.median(each[tree] for each in rounds) * 1e3 for tree in (0, 1))
        ratios = [one / two for one, two in rounds]
        row = f"{case:14} {before:9.1f} {after:9.1f} {statistics.median(ratios):6.3f}"
        print(f"{row} {min(ratios):6.3f} {max(ratios):6.3f}", flush=True)


def both(before: Path, after: Path, case: str, steps: int, turn: int) -> tuple[float, float]:
    """Return the seconds of a step in each tree; which one is first alternates."""
    if turn % 2 == 0:
        first = seconds(before, case, steps)
        return first, seconds(after, case, steps)
    last = seconds(after, case, steps)
    return seconds(before, case, steps), last


def seconds(tree: Path, case: str, steps: int) -> float:
    """Train in a tree and return the median of its steps."""
    with tempfile.TemporaryDirectory() as work:
        command = [tree.resolve() / ".venv" / "bin" / "nxdt", "train", *CASES[case], f"trainer.max_steps={steps}"]
        subprocess.run(
            [*command, f"exp_manager.exp_dir={work}", "trainer.log_every_n_steps=1"],
            check=True,
            capture_output=True,
            cwd=work,
        )
        (log,) = Path(work).rglob("metrics.jsonl")
        found = [json.loads(line) for line in log.read_text().splitlines()]
    times = [each["step_time_s"] for each in found if WARM_UP < each["step"] < steps]
    return statistics.median(times)


if __name__ == "__main__":
    main()
