"""``model.trainable`` keeps what nxdt asks of all adapters, and its runs resume bitwise identical, also with more."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.adapter_contract import AdapterContract
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.run.training import train
from nxdt_core.train.build import Trainable
from nxdt_core.train.weights.loading import find_weights


def chosen(section):
    """What trains, which is not a separate section."""
    return Trainable(("norm", "layers.*.attention.o_proj"))


class TestTrainable(AdapterContract):
    """It trains what is named of the base, and adds nothing."""

    name = "trainable"
    trains_of_base = ("norm.weight", "*.o_proj.weight")

    @pytest.fixture
    def factory(self):
        return chosen

    @pytest.fixture
    def section(self):
        return None

    def tries(self, layout, config):
        return layout == "pp" or config.getoption("samples", default=None) == "all"


TINY = ("checkpoint.every_n_train_steps=2", "model.num_layers=1", "model.hidden_size=32", "data.seq_length=16")
TOP = "model.trainable=[lm_head, norm]"


@pytest.fixture
def run(tmp_path):
    """``run(name, *overrides)``: train, and return the weights and the optimizer's state of the newest checkpoint."""

    def trained(name, *overrides):
        config = load("recipe:llama-tiny", [f"exp_manager.exp_dir={tmp_path}", f"name={name}", *TINY, *overrides])
        train(config)
        store = checkpoint.open_storage(config.checkpoint_uri)
        manifest = checkpoint.latest(store, warn=print)
        return checkpoint.load_model(store, manifest), checkpoint.load_optimizer(store, manifest)

    return trained


def test_a_resume_is_bitwise_identical_and_may_train_more(run, tmp_path):
    whole, state = run("whole", TOP, "trainer.max_steps=4")
    first, _ = run("broken", TOP, "trainer.max_steps=2")
    broken, again = run("broken", TOP, "trainer.max_steps=4")
    assert whole.keys() == broken.keys()
    assert state.keys() == again.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert {name for name in whole if not torch.equal(whole[name], first[name])} == {"lm_head.weight", "norm.weight"}
    assert {name.partition("/")[0] for name in state} == {"lm_head.weight", "norm.weight"}
    assert find_weights(str(tmp_path / "whole")).run.run.model.trainable is None, "an adapter may be laid over it"
    more, thawed = run("broken", "trainer.max_steps=6")
    assert {name.partition("/")[0] for name in thawed} == set(more)
    assert not any(torch.equal(more[name], broken[name]) for name in more)


def test_an_adapter_and_what_trains_are_not_both_chosen():
    with raises(ConfigError, match="adapter.name: lora decides what is frozen"):
        load("recipe:llama-tiny", [TOP, "adapter.name=lora"])
