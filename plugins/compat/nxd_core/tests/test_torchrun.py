"""The sample programs of NxD Core's documentation as scripts of their own, which torchrun starts on 1 and 2 ranks."""

import json
import os
import sys
from pathlib import Path

import pytest
from nxdt_testing.ranks import RankPool

from plugins.compat.nxd_core.tests.lightning_programs import in_plain_torch
from plugins.compat.nxd_core.tests.test_lora_and_zero1 import with_zero1
from tests import processes
from tests.sampling import slow

SCRIPT = """
import json, os, sys

from plugins.compat.nxd_core.tests.lightning_programs import with_lightning
from plugins.compat.nxd_core.tests.test_lora_and_zero1 import with_zero1
from plugins.compat.nxd_core.tests.test_sample_program import sample

path, *programs = sys.argv[1:]
size = int(os.environ["WORLD_SIZE"])
known = {
    "sample": lambda: sample(f"{path}/sample", size > 1),
    "zero1": lambda: with_zero1(f"{path}/zero1"),
    "lightning": lambda: with_lightning(
        f"{path}/lightning", {"tensor_parallel_size": size, "zero": True}, True, 1
    ),
}
found = {name: known[name]() for name in programs}
with open(f"{path}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""
OWN = """
import torch.distributed as dist

import nxdt_plugin_nxd_core as nxd
from nxdt_plugin_nxd_core import parallel_state

nxd.neuronx_distributed_config()
group = parallel_state.get_data_parallel_group()
print("found", dist.get_rank(), dist.get_world_size(), dist.get_world_size(group), dist.is_initialized())
"""
ROOT = Path(__file__).parents[4]

ALL = ("sample", "zero1", "lightning")


def test_a_loop_of_one_process_has_a_process_group_under_torchrun(tmp_path):
    done = started(tmp_path, OWN, 1)
    assert "found 0 1 1 True" in done.stdout, done.stderr


def started(path, script, ranks, *arguments):
    """Run a script under torchrun."""
    (path / "loop.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return processes.run(
        [sys.executable, *torchrun, str(path / "loop.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.parametrize(("ranks", "programs"), [slow(1, ALL), slow(2, ALL), (2, ("lightning",))])
def test_programs_that_torchrun_starts_equal_yaml_and_plain_torch(tmp_path, ranks, programs):
    """By default the one whose trainer looks for a launcher; ranks of pools run the others in files of their own."""
    done = started(tmp_path, SCRIPT, ranks, str(tmp_path), *programs)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found.keys() == {*programs}
        rows, again, loss = found["lightning"]
        expected = in_plain_torch()
        assert [pytest.approx(row, abs=1e-9) for row in expected] == rows
        assert [pytest.approx(expected[2], abs=1e-9)] == again
        assert loss == pytest.approx(expected[2][0], abs=1e-9)
        if "sample" in programs:
            in_yaml, losses, last = found["sample"]
            assert losses == pytest.approx(in_yaml, abs=2e-6)
            assert last == losses[-1]
        if "zero1" in programs:
            (alone,) = RankPool(1).run(with_zero1, str(tmp_path / "alone"))
            assert found["zero1"][0] == pytest.approx(alone[0], abs=1e-9)
