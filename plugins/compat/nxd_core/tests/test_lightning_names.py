"""A Lightning program over NxD Core's names trains as plain torch does, resumes, and is refused with a code."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import lightning as names
from nxdt_testing.ranks import RankPool
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.lightning_programs import PIPELINE, Rows, fit, in_plain_torch, with_lightning
from plugins.compat.nxd_core.tests.loops import Decoder
from tests.calls import Call, run_in_turn
from tests.sampling import asked, slow_except

LAYOUTS = {
    "alone": (1, {}, False, 1),
    "tp2-zero1-own": (2, {"tensor_parallel_size": 2, "zero": True}, True, 1),
    "dp2-accumulated": (2, {"zero": True}, False, 2),
    "dp2-own": (2, {}, True, 2),
    "pp2": (2, {"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}, False, 1),
    "pp2-own": (2, {"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}, True, 1),
}


def close(row):
    return pytest.approx(row, abs=1e-9)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Directory of each layout, and what its ranks returned; layouts of a size share ranks."""
    places = {name: tmp_path_factory.mktemp(name) for name in LAYOUTS if name in asked(request, "name")}
    calls = {}
    for name, place in places.items():
        size, *arguments = LAYOUTS[name]
        calls[name] = Call(size, with_lightning, (str(place), *arguments))
    found = run_in_turn(calls, timeout_s=60 * len(calls))
    return {name: (place, found[name]) for name, place in places.items()}


@pytest.mark.parametrize("name", slow_except(LAYOUTS, ("dp2-accumulated", "pp2-own")))
def test_steps_equal_plain_torch_and_a_checkpoint_resumes(trained, name):
    """By default, ``test_torchrun.py`` runs the case of tensor parallelism."""
    expected = in_plain_torch()
    directory, ranks = trained[name]
    for rows, again, loss in ranks:
        assert [close(row) for row in expected] == rows
        assert [close(expected[2])] == again
        assert loss == pytest.approx(expected[2][0], abs=1e-9)
    events = EventAccumulator(str(directory / "lightning_logs/version_0")).Reload()
    logged = dict.fromkeys(each.value for each in events.Scalars("loss"))  # once a batch, of the step before
    assert [*logged] == pytest.approx([row[0] for row in expected], abs=1e-6)


@pytest.fixture
def config():
    made = nxd.neuronx_distributed_config()
    yield made
    made.engine.shutdown()


def module(config, **changed):
    arguments = {"opt_cls": torch.optim.SGD, "scheduler_cls": torch.optim.lr_scheduler.ConstantLR, **changed}
    return names.NeuronLTModule(**{"model_fn": Decoder, "nxd_config": config, **arguments})


def refused(code, words):
    return pytest.raises(NxdtError, match=rf"(?s)\[{code}\].*{words}")


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"manual_opt": False}, "NXDT-T050", "manual_opt"),
        ({"nxd_config": {}}, "NXDT-T050", "nxd_config"),
        ({"opt_cls": "adamw"}, "NXDT-T050", "opt_cls"),
        ({"scheduler_cls": None}, "NXDT-T050", "scheduler_cls"),
        ({"opt_kwargs": [0.1]}, "NXDT-T050", "opt_kwargs"),
        ({"model_args": 2}, "NXDT-T050", "model_args"),
        ({"grad_accum_steps": 0}, "NXDT-T050", "grad_accum_steps"),
        ({"grad_acc": 2}, "NXDT-T063", "grad_acc.*grad_accum_steps"),
    ],
)
def test_modules_that_cannot_be(config, changed, code, words):
    with refused(code, words):
        module(config, **changed)


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"model_fn": None}, "NXDT-T050", "model_fn"),
        ({"model_fn": lambda: "llama"}, "NXDT-T051", "returned str"),
        ({"opt_kwargs": {"momentun": 1}}, "NXDT-T050", "momentun"),
        ({"opt_args": (0.1,) * 20}, "NXDT-T050", "opt_args"),
        ({"scheduler_kwargs": {"factr": 1}}, "NXDT-T050", "factr"),
    ],
)
def test_modules_that_cannot_be_trained(config, changed, code, words):
    with refused(code, words):
        trainer().fit(module(config, **changed))


def trainer(**more):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    return Trainer(strategy=names.NeuronXLAStrategy(), max_steps=1, **quiet, **more)


class Watching(Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer)


def test_hooks_before_an_optimizer_step_are_called(config):
    callback, rows = Watching(), DataLoader(Rows([0]), batch_size=8)
    trainer(callbacks=[callback]).fit(module(config, opt_kwargs={"lr": 0.1}), rows)
    assert [type(optimizer).__name__ for optimizer in callback.seen] == ["NxDOptimizer"]


def test_positional_arguments_reach_the_optimizer(config):
    built = module(config, opt_args=(0.25, 0.5))
    built.setup()
    (optimizer,), _ = built.configure_optimizers()
    assert (optimizer.param_groups[0]["initial_lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.5)


def test_trainers_that_cannot_be(config):
    with refused("NXDT-T050", "BoringModel"):
        trainer().fit(BoringModel())
    with refused("NXDT-T042", "precision='bf16-mixed'"):
        trainer(precision="bf16-mixed").fit(module(config))
    with refused("NXDT-T050", "tensor_parallel_size=2"):
        names.NeuronXLAStrategy(tensor_parallel_size=2)
    other = nxd.neuronx_distributed_config()
    with refused("NXDT-T050", "nxd_config"):
        trainer().fit(module(config))
    other.engine.shutdown()


def test_a_strategy_makes_the_layout_that_it_is_asked_for(tmp_path):
    (found,) = RankPool(1).run(strategy_alone, str(tmp_path))
    assert found[0] == close(in_plain_torch()[0])


def strategy_alone(directory):
    torch.manual_seed(7)
    strategy = names.NeuronXLAStrategy(tensor_parallel_size=1)
    strategy.nxd_config["optimizer_config"]["max_grad_norm"] = 0.5
    rows, _ = fit(directory, strategy.nxd_config, names.NeuronLTModule, 1, [0])
    strategy.engine.shutdown()
    return rows
