"""The Lightning classes in a user's own Trainer."""

import pytorch_lightning as pl
import torch

from nxdt_core.training import NxdtDataModule, NxdtModule, NxdtStrategy, train


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
