"""The Lightning classes in a user's own Trainer, and the processes that it starts or finds."""

import json
import sys
import time

import pytest
import pytorch_lightning as pl
import torch
from nxdt_plugin_lightning import NxdtDataModule, NxdtModule, NxdtStrategy
from nxdt_plugin_lightning.strategy import EngineAccelerator
from nxdt_testing.errors import raises

from nxdt_core.errors.checkpoints import UnsavableState
from nxdt_core.run import train
from tests import processes
from tests.launch.launching import environment
from tests.train.small import SMALL


class Losses(pl.Callback):
    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen[trainer.global_step] = float(pl_module.last.loss.loss)


def fit(config, steps, *callbacks, ckpt_path=None, **more):
    module, losses = NxdtModule(config), Losses()
    trainer = pl.Trainer(
        strategy=NxdtStrategy(config),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[losses, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{"enable_checkpointing": bool(callbacks), **more},
    )
    trainer.fit(module, NxdtDataModule(config), ckpt_path=ckpt_path)
    return trainer, module, losses.seen


def test_a_users_trainer_trains_as_nxdt_train_does(small_run, metric_rows):
    config = small_run("trainer.max_steps=4")
    train(config)
    _, _, seen = fit(config, 4)
    assert seen == {step: row["loss"] for step, row in metric_rows(config.run_dir).items()}


def test_lightnings_own_checkpoint_callback_and_ckpt_path_use_our_format(small_run, tmp_path):
    config = small_run()
    _, whole, losses = fit(config, 5)
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "pl", every_n_train_steps=2, save_top_k=-1)
    fit(config, 2, saver)
    (path,) = (tmp_path / "pl").iterdir()
    assert next(path.glob("step-00000002/manifest.json"))
    trainer, resumed, seen = fit(config, 5, ckpt_path=str(path))
    assert trainer.global_step == 5
    assert seen == {step: losses[step] for step in (3, 4, 5)}
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_lightnings_callback_can_delete_what_it_no_longer_keeps(small_run, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "pl", every_n_train_steps=1, save_top_k=1)
    fit(small_run(), 3, saver)
    assert [path.parent.name for path in (tmp_path / "pl").rglob("manifest.json")] == ["step-00000003"]


def test_reading_lightnings_estimate_of_steps_does_not_move_the_data(small_run):
    """Its issue 20550: reading it reset a stateful loader, and a resume began at the first sample again."""

    class Curious(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.estimate = trainer.estimated_stepping_batches

    config = small_run("trainer.max_steps=2")
    _, _, losses = fit(config, 4)
    summary = train(config)
    _, _, seen = fit(config, 4, Curious(), ckpt_path=summary.checkpoint, enable_checkpointing=False)
    assert seen == {step: losses[step] for step in (3, 4)}


class Keeps(pl.Callback):
    """Whose state is what it was given."""

    def __init__(self, state):
        self.state = state
        self.loaded = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def test_state_of_callbacks_comes_back_as_it_was(small_run, tmp_path):
    state = {"best": 1.5, "seen": (1, 2), "by step": {3: None}, "mean": torch.ones(2)}
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "pl", every_n_train_steps=2, save_top_k=-1)
    fit(small_run(), 2, saver, Keeps(state))
    (path,) = (tmp_path / "pl").iterdir()
    again = Keeps({})
    fit(small_run(), 3, again, ckpt_path=str(path), enable_checkpointing=False)
    assert torch.equal(again.loaded.pop("mean"), state.pop("mean"))
    assert again.loaded == state


@pytest.mark.parametrize("bad", [object(), {1}, Keeps, len, b"bytes", torch.device("meta")])
def test_state_of_callbacks_that_is_no_data_is_refused_with_its_key(small_run, tmp_path, bad):
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "pl", every_n_train_steps=2, save_top_k=-1)
    with raises(UnsavableState, match=r"callbacks/Keeps/deep/0'.* cannot be saved"):
        fit(small_run(), 2, saver, Keeps({"deep": [bad]}))
    assert not list(tmp_path.rglob("manifest.json"))


def test_state_of_the_data_module_is_refused_with_its_key(small_run, tmp_path):
    class Data(NxdtDataModule):
        def state_dict(self):
            return {"pool": object()}

    config = small_run()
    strategy = NxdtStrategy(config)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, max_epochs=-1, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
                         enable_checkpointing=False)  # fmt: skip
    trainer.fit(NxdtModule(config), Data(config))
    with raises(UnsavableState, match="Data/pool"):
        trainer.save_checkpoint(str(tmp_path / "pl"))


SCRIPT = """
import json, os, sys
import pytorch_lightning as pl
from nxdt_core.config import load
from nxdt_plugin_lightning import NxdtDataModule, NxdtModule, NxdtStrategy

class Losses(pl.Callback):
    seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(pl_module.last.loss.loss))

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
config = load("recipe:llama-tiny", sys.argv[2:])
trainer = pl.Trainer(
    strategy=NxdtStrategy(config), accelerator="cpu", devices=int(sys.argv[1]), callbacks=[Losses()], **quiet
)
trainer.fit(NxdtModule(config), NxdtDataModule(config))
ranks = trainer.strategy.engine.ranks
with open(f"{os.path.dirname(__file__)}/found-{ranks.rank}.json", "w") as file:
    json.dump([ranks.world_size, Losses.seen], file)
"""
LAYOUT = "distributed_strategy.tensor_model_parallel_size=2"


def run_script(where, devices, *launcher, **variables):
    """What each rank of the script found, by its number."""
    (where / "script.py").write_text(SCRIPT)
    keys = (*SMALL, "trainer.devices=2", LAYOUT, "trainer.max_steps=3", "trainer.val_check_interval=null")
    words = [*launcher, str(where / "script.py"), str(devices), *keys, f"exp_manager.exp_dir={where}"]
    kept = environment(**variables)
    done = processes.run([sys.executable, *words], env=kept, capture_output=True, text=True, timeout=120)
    end = time.monotonic() + 30 * (done.returncode == 0)
    while len(files := sorted(where.glob("found-*.json"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)  # rank 0 does not wait for the others to end
    time.sleep(0.2 * bool(files))
    return done, {int(path.stem[-1]): tuple(json.loads(path.read_text())) for path in files}


def test_a_script_starts_the_ranks_that_its_trainer_asks_for(tmp_path, small_run, metric_rows):
    """The losses are those of one process, and the steps those of the configuration."""
    done, found = run_script(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    train(small_run("trainer.max_steps=3", name="alone"))
    expected = [row["loss"] for row in metric_rows(tmp_path / "alone").values()]
    assert {rank: size for rank, (size, _) in found.items()} == {0: 2, 1: 2}
    assert all(losses == pytest.approx(expected, rel=1e-5) for _, losses in found.values())


@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_that_torchrun_started_are_taken(tmp_path, devices):
    done, found = run_script(tmp_path, devices, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert {rank: size for rank, (size, _) in found.items()} == {0: 2, 1: 2}


def test_a_trainer_that_asks_for_other_numbers_than_the_configuration_is_refused(tmp_path):
    done, found = run_script(tmp_path, 3)
    assert not found
    assert "NXDT-T042" in done.stderr
    assert "trainer.devices=3" in done.stderr


def test_lightning_is_given_an_accelerator_of_ours_where_it_knows_none():
    accelerator = EngineAccelerator(torch.device("xla", 0))
    trainer = pl.Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    assert trainer.accelerator is accelerator
    assert accelerator.get_device_stats(None) == {}
