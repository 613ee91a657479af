"""Seconds per step of ``nxdt train`` in two working trees, such as two commits, step by step in turn.

Claim: a change that does not concern CPU speed does not reduce it. Each tree needs its own virtual environment in
``.venv``, as ``make install`` creates it. Each case trains in both trees at once, but only one of them runs at a time:
when its log has another step, a signal stops it and the other continues. So both trees take the same step
within the same two or three seconds, and other load on the machine affects both. Two consecutive runs
differ by a tenth on a shared machine; pairs of steps repeat within one or two percent. The first steps do not count.
Rows give the medians over all steps, the median ratio of the pairs, and the least and largest median of a round: above
1, the second tree is faster. Needs two idle cores.

    python benchmarks/steps/working_trees.py ../before . [--rounds 3] [--steps 40] [--only dp2 tp2]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
import time
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
POLL_S = 0.005
LONGEST_STEP_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        print(f"other programs keep {load_before:.1f} cores busy: these figures mean little")
    print(f"{'case':14} {'before ms':>9} {'after ms':>9} {'ratio':>6} {'least':>6} {'most':>6}  pairs of steps")
    for case in options.only:
        rounds = [alternate((options.before, options.after), case, options.steps) for _ in range(options.rounds)]
        pairs = [pair for pairs in rounds for pair in pairs]
        before, after = (statistics.median(pair[tree] for pair in pairs) * 1e3 for tree in (0, 1))
        medians = [median_ratio(each) for each in rounds]
        row = f"{case:14} {before:9.1f} {after:9.1f} {median_ratio(pairs):6.3f}"
        print(f"{row} {min(medians):6.3f} {max(medians):6.3f}  {len(pairs)}", flush=True)


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(before / after for before, after in pairs)


def alternate(trees: tuple[Path, Path], case: str, steps: int) -> list[tuple[float, float]]:
    """Train in both trees, one step of each in turn, and return the seconds of each counted step in both."""
    with tempfile.TemporaryDirectory() as work:
        runs = [Run(tree, case, steps, Path(work) / str(at)) for at, tree in enumerate(trees)]
        try:
            while any(run.is_alive for run in runs):
                for run in runs:
                    run.advance()
        finally:
            for run in runs:
                run.end()
        return list(zip(*(run.seconds[WARM_UP : steps - 1] for run in runs), strict=True))


def family(process: int) -> list[int]:
    """Return a process and all that descend from it, parents first."""
    found = [process]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


class Run:
    """``nxdt train`` in a tree, stopped unless it is asked to advance."""

    def __init__(self, tree: Path, case: str, steps: int, work: Path) -> None:
        work.mkdir()
        self.work = work
        self.seconds: list[float] = []
        command = [tree.resolve() / ".venv" / "bin" / "nxdt", "train", *CASES[case], f"trainer.max_steps={steps}"]
        self.process = subprocess.Popen(
            [*command, f"exp_manager.exp_dir={work}", "trainer.log_every_n_steps=1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=work,
        )
        self._signal(signal.SIGSTOP)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def advance(self) -> None:
        """Run until the log has a further step, or until the process ends."""
        if not self.is_alive:
            return
        self._signal(signal.SIGCONT)
        begin = time.perf_counter()
        while self._logged() <= len(self.seconds) and self.is_alive:
            if time.perf_counter() - begin > LONGEST_STEP_S:
                raise RuntimeError(f"no step within {LONGEST_STEP_S:g} s in {self.work}")
            time.sleep(POLL_S)
        if self.is_alive:
            self._signal(signal.SIGSTOP)
            self.seconds.append(time.perf_counter() - begin)
        elif self.process.returncode:
            raise RuntimeError(self.process.stderr.read() if self.process.stderr else "")

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self.is_alive:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: int) -> None:
        """Send a signal to the command and to its ranks, which are in separate sessions."""
        for process in reversed(family(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _logged(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.work.rglob("metrics.jsonl"))


if __name__ == "__main__":
    main()
