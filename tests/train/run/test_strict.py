"""A checkpoint of another model: refused with the keys that differ, or loaded as far as it goes."""

import logging
import sys

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.run import train
from nxdt_core.train import TrainSession
from tests import processes
from tests.train.small import SMALL


@pytest.fixture(scope="module")
def of_two_layers(tmp_path_factory):
    """A run of two steps."""
    where = (f"exp_manager.exp_dir={tmp_path_factory.mktemp('saved')}", "name=saved")
    config = load("recipe:llama-tiny", [*SMALL, *where, "trainer.max_steps=2", "model.num_layers=2"])
    train(config)
    return config


@pytest.fixture
def saved(of_two_layers):
    """Address of its checkpoint."""
    return of_two_layers.checkpoint_uri


def other(small_run, saved, *overrides, name="other"):
    return small_run(f"checkpoint.resume_from={saved}", "trainer.max_steps=3", *overrides, name=name)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    ("override", "found", "saved_with"),
    [
        (
            "model.num_layers=3",
            r"9 missing \('layers\.2\.attention_norm.weight', .* and 5 more\)",
            "model.num_layers=2",
        ),
        (
            "model.num_layers=1",
            r"9 unknown \('layers\.1\.attention_norm.weight', .* and 5 more\)",
            "model.num_layers=2",
        ),
        ("model.vocab_size=384", "2 of another shape", "model.vocab_size=272"),
        ("model.ffn_hidden_size=40", "6 of another shape", "model.ffn_hidden_size="),
    ],
)
def test_another_model_is_refused_with_what_differs(small_run, saved, weights_only, override, found, saved_with):
    config = other(small_run, saved, "model.num_layers=2", override, f"checkpoint.weight_init_only={weights_only}")
    with pytest.raises(WeightsDoNotFit, match=found) as caught:
        train(config)
    assert saved_with in caught.value.do()
    assert ("strict=false" in caught.value.do()) == ("num_layers" in override)
    assert "name=" not in caught.value.do(), "it has another"


def test_a_run_that_resumes_as_another_model_is_told_to_take_another_name(small_run):
    train(small_run("trainer.max_steps=1", name="taken"))
    with pytest.raises(WeightsDoNotFit) as caught:
        train(small_run("trainer.max_steps=2", "model.ffn_hidden_size=40", name="taken"))
    assert "give the new run another name=" in caught.value.do()


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_is_missing_keeps_its_fresh_values_and_is_told(
    small_run, of_two_layers, saved, weights, caplog, weights_only
):
    common = ("model.num_layers=3", f"checkpoint.weight_init_only={weights_only}", "checkpoint.strict=false")
    steps = () if weights_only else ("model.optim.lr=0.0", "model.optim.sched.min_lr=0.0")
    config = other(small_run, saved, *common, *steps, f"trainer.max_steps={1 if weights_only else 3}")
    with caplog.at_level(logging.WARNING):
        train(config)
    assert (
        "9 parameters that the checkpoint lacks keep their fresh values: 'layers.2.attention_norm.weight'"
        in caplog.text
    )
    if weights_only:
        return
    fresh = weights_of_fresh(small_run)
    old, new = weights(of_two_layers), weights(config)
    assert torch.equal(new["layers.1.mlp.up_proj.weight"], old["layers.1.mlp.up_proj.weight"])
    assert torch.equal(new["layers.2.mlp.up_proj.weight"], fresh["layers.2.mlp.up_proj.weight"])


def weights_of_fresh(small_run):
    """Of a model of three layers that was never trained."""
    config = small_run("model.num_layers=3", name="fresh")
    with TrainSession(config) as session:
        return session.model.state_dict()


def test_what_the_model_lacks_is_left_out_and_told(small_run, saved, weights, caplog):
    config = other(small_run, saved, "model.num_layers=1", "checkpoint.strict=false")
    with caplog.at_level(logging.WARNING):
        train(config)
    assert "9 parameters that the model lacks are left out: 'layers.1.attention_norm.weight'" in caplog.text
    assert not [name for name in weights(config) if "layers.1." in name]


def test_shapes_must_agree_all_the_same(small_run, saved):
    with pytest.raises(WeightsDoNotFit, match="2 of another shape"):
        train(other(small_run, saved, "model.num_layers=2", "model.vocab_size=384", "checkpoint.strict=false"))


def test_ranks_fill_what_is_missing_with_what_one_process_does(small_run, saved, weights):
    still = ("model.num_layers=3", "checkpoint.strict=false", "model.optim.lr=0.0", "model.optim.sched.min_lr=0.0")
    one = other(small_run, saved, *still)
    train(one)
    ranks = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    two = other(small_run, saved, *still, *ranks, name="two")
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *two.overrides]
    done = processes.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = "9 parameters that the checkpoint lacks keep their fresh values"
    assert (done.stdout + done.stderr).count(told) == 1
    expected, found = weights(one), weights(two)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found if "optim" not in name)
