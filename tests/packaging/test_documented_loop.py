"""The training loop of the documentation trains on one global batch, however many ranks share it."""

import re
from pathlib import Path

import pytest
from nxdt_testing.ranks import RankPool

PAGE = (Path(__file__).parents[2] / "docs/training-loop.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LOOP = next(code for code in PROGRAMS if "TrainSession" in code)


def steps_of_the_loop(directory):
    """Run the program; return loss, gradient norm and rows of each step, and the counters at its end."""
    seen = []

    def note(step, loss):
        rows = [tuple(row.tolist()) for part in names["batch"].micro_batches for row in part.input_ids]
        seen.append((loss, float(names["result"].grad_norm), rows))

    names = {"print": note}
    overrides = ["trainer.max_steps=2", f"exp_manager.exp_dir={directory}"]
    exec(LOOP.replace('"recipe:llama-tiny"', f'"recipe:llama-tiny", {overrides!r}'), names)
    return seen, names["session"].state.to_dict()


def test_ranks_share_the_global_batch_of_one_process(tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    ((alone, counted),) = RankPool(1).run(steps_of_the_loop, one, timeout_s=120)
    (first, *_), (second, *_) = shared = RankPool(2).run(steps_of_the_loop, two, timeout_s=240)
    for (loss, norm, rows), one, other in zip(alone, first, second, strict=True):
        assert len(set(rows)) == len(rows)
        assert not set(one[2]) & set(other[2])
        assert one[2] + other[2] == rows
        assert one[:2] == other[:2] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))
    assert [state for _, state in shared] == [counted, counted]
