"""Runs that begin with what NxD Training saved: its weights, or all of it."""

import pytest
import torch

from nxdt_core.hf.key_map import sources
from nxdt_core.run import train
from nxdt_core.train import build
from nxdt_core.train.weights.importing import import_checkpoint
from plugins.migration.nxd.tests.nxd_writer import Written
from tests.sampling import slow
from tests.train.small import SMALL

SIZES = ("model.num_layers=2", "model.num_attention_heads=4", "model.num_kv_heads=2")
STILL = ("model.optim.lr=0.0", "model.optim.sched.min_lr=0.0")


@pytest.fixture
def expected(small_run):
    """Random weights by our names."""
    found = sources(build.model_builder(small_run(*SIZES)))
    return {source.name: torch.randn(source.shape) / 10 for source in found}


@pytest.fixture
def saved(small_run, tmp_path, expected):
    """They as a checkpoint of step 7, cut over two by two ranks."""
    found = sources(build.model_builder(small_run(*SIZES)))
    state = {source.hf_names[0]: expected[source.name] for source in found}
    return Written(heads=4, kv_heads=2, tp=2, pp=2, xser=True).write(tmp_path / "tag.ckpt", state, 2)


@pytest.fixture
def imported(saved, tmp_path):
    """Address of what an import makes of it."""
    address = str(tmp_path / "imported")
    import_checkpoint(str(saved), address, config="recipe:llama-tiny", overrides=[*SMALL, *SIZES])
    return address


@pytest.mark.parametrize("directly", [slow(False), True])
def test_a_run_begins_with_the_weights(request, small_run, saved, expected, weights, directly):
    source = saved if directly else request.getfixturevalue("imported")
    start = (f"checkpoint.resume_from={source}", "checkpoint.weight_init_only=true")
    config = small_run(*SIZES, *STILL, *start, "trainer.max_steps=1")
    assert train(config).step == 1
    found = weights(config)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_a_run_goes_on_with_the_optimizers_state(small_run, imported, expected, weights, metric_rows):
    config = small_run(*SIZES, *STILL, f"checkpoint.resume_from={imported}", "trainer.max_steps=8")
    assert train(config).step == 8
    assert list(metric_rows(config.run_dir)) == [8]
    found = weights(config)
    beta = config.to_dict()["model"]["optim"]["betas"][0]
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
        assert found[f"optim/{name}/step"] == 8
        before, after = weight / 2, found[f"optim/{name}/exp_avg"]
        assert (after - beta * before).norm() <= (1 - beta) * 1.01  # the gradient, which is clipped to 1
