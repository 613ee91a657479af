"""A program: trains tiny models under both engines and prints the largest differences. `make show-nxd NXD=FOLDER`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import safetensors.numpy

sys.path.insert(0, str(Path(__file__).parent))

import test_checkpoints as checkpoints
import test_parity as parity
from nxdt_testing.ranks import RankPool

ROWS = {
    "TP 2": "llama-tp2",
    "PP 2": "llama-pp2",
    "TP 2, PP 2": "llama-tp2-sp-pp2",
    "PP 2, 2 stages each": "llama-pp2-vpp2",
    "ZeRO-1": "llama-dp2-zero1",
    "EP 2": "mixtral-capacity-ep2",
    "TP 2, EP 2, ZeRO-1": "mixtral-capacity-tp2-sp-ep2-zero1",
}
"""Layout → case of the parity tests."""


def main() -> None:
    """Print one row for each layout, and one for a run that changes its engine twice."""
    columns = list(parity.LIMITS)
    print(f"{'layout':<22}" + "".join(f"{column:>13}" for column in columns))
    for ranks in (2, 4):
        cases = [case for case in ROWS.values() if parity.ALL_LAYOUTS[parity.CASES[case][1]][0] == ranks]
        by_rank = RankPool(ranks).run(parity.train_each, cases, timeout_s=900)
        for number, case in enumerate(cases):
            found = parity.differences_of(case, [each[number] for each in by_rank])
            layout = next(layout for layout, named in ROWS.items() if named == case)
            print(f"{layout:<22}" + "".join(f"{found[column]:>13.1e}" for column in columns), flush=True)
    print("\ncheckpoint torch, nxd TP 2, torch: " + checkpoint_of_both())


def checkpoint_of_both() -> str:
    """Two steps under each engine in turn, compared with six steps of the torch engine."""
    with tempfile.TemporaryDirectory() as name:
        whole, changed = Path(name, "whole"), Path(name, "changed")
        whole.mkdir()
        changed.mkdir()
        checkpoints.train(whole, 6, *checkpoints.TORCH)
        for steps, engine in zip((2, 4, 6), checkpoints.ROUTES["torch, nxd TP2, torch"], strict=True):
            checkpoints.train(changed, steps, *engine)
        losses = zip(checkpoints.losses(whole), checkpoints.losses(changed), strict=True)
        theirs, ours = (safetensors.numpy.load_file(checkpoints.export(each)) for each in (whole, changed))
        weights = max(float(abs(ours[name] - theirs[name]).max()) for name in theirs)
        return f"losses {max(abs(a - b) for a, b in losses):.1e}, weights {weights:.1e}"


if __name__ == "__main__":
    main()
