"""A plugin that runs take from a copy of this file: a callback that waits in step 5 until a test has caused a loss.

Next to the copy, ``reached-RANK`` says that a rank waits, and ``lost`` lets all continue.
"""

import time
from pathlib import Path

import pytorch_lightning as pl

from nxdt_core.api import CallbackComponent, hookimpl

HERE = Path(__file__).parent


class Waits(pl.Callback):
    def __init__(self, config, run_dir): ...

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.train_state.step != 5 or (HERE / "lost").exists():
            return
        (HERE / f"reached-{trainer.global_rank}").touch()
        while not (HERE / "lost").exists():
            time.sleep(0.02)


@hookimpl
def nxdt_callbacks():
    return [CallbackComponent(name="waits", target="waits:Waits", summary="Waits in a step for a loss.")]
