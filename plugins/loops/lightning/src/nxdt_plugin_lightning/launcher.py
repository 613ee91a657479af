"""Checks of a user's Trainer, and the launcher that lets nxdt start the processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, final

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher

from nxdt_core.distributed.environment import read_rank_environment
from nxdt_plugin_lightning.errors import NotOurModule, TrainerArgumentsIgnored
from nxdt_plugin_lightning.module import NxdtModule

_UNCALLED = {
    **dict.fromkeys(("on_before_backward", "on_after_backward", "on_before_zero_grad"), "on_before_optimizer_step"),
    **dict.fromkeys(("backward", "optimizer_step", "optimizer_zero_grad"), "a component of the kind optimizer"),
    "configure_gradient_clipping": "trainer.gradient_clip_val in the configuration",
}
"""Hooks of Lightning's own optimization, which the step of nxdt does not call, and what does their work."""

_UNFIT = {
    **dict.fromkeys(("WeightAveraging", "StochasticWeightAveraging"), "exp_manager.ema in the configuration"),
    "GradientAccumulationScheduler": "data.global_batch_size and data.micro_batch_size in the configuration",
    "BatchSizeFinder": "data.micro_batch_size in the configuration, and nxdt plan",
    "LearningRateFinder": "model.optim.lr in the configuration",
    "BaseFinetuning": "an adapter, or a callback that calls requires_grad_(False) in on_fit_start",
    "ModelPruning": "a callback that changes weights in on_train_batch_end",
}
"""Lightning's callbacks that look for weights before there are any, copy the module or change Lightning's own loop."""


def asked_processes(trainer: pl.Trainer) -> tuple[int, int]:
    """Return ``devices`` and ``num_nodes`` as they were given; ``trainer.num_devices`` is 1 for any own strategy."""
    given = trainer._accelerator_connector
    devices = given._devices_flag
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return count, int(given._num_nodes_flag)


def check_trainer(module: pl.LightningModule, world_size: int) -> None:
    """Refuse what Lightning would accept and nxdt not carry out.

    Args:
        module: connected to its ``Trainer``.
        world_size: processes that run.

    Raises:
        NotOurModule: the model is not an :class:`NxdtModule`.
        TrainerArgumentsIgnored: arguments whose work the configuration decides, callbacks that cannot work,
            or hooks that nothing calls.
    """
    if not isinstance(module, NxdtModule):
        raise NotOurModule(found=type(module).__name__)
    found = tuple(_ignored(module.trainer, world_size, module.config.run.trainer.max_epochs))
    if found:
        raise TrainerArgumentsIgnored(arguments=found)


def _ignored(trainer: pl.Trainer, world_size: int, passes: int | None) -> Iterator[tuple[str, str]]:
    """Arguments, and what does their work here; ``passes`` are those of the configuration."""
    precision = trainer.precision
    if precision != "32-true":
        yield f"precision={precision!r}", "precision.type in the configuration"
    devices, nodes = asked_processes(trainer)
    if devices * nodes not in (1, world_size):
        yield f"devices={devices}, num_nodes={nodes}", f"numbers that agree with the {world_size} processes that run"
    if trainer.gradient_clip_val is not None:
        yield f"gradient_clip_val={trainer.gradient_clip_val}", "trainer.gradient_clip_val in the configuration"
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "data.global_batch_size and data.micro_batch_size in the configuration",
        )
    if passes is not None and passes > 0:  # nothing turns them into the steps that a schedule needs
        yield f"trainer.max_epochs={passes} of the configuration", "trainer.max_steps in the configuration"
    owners: tuple[object, ...] = (trainer.lightning_module, *trainer.callbacks)  # type: ignore[attr-defined]
    for owner in owners:
        unfit = (each.__name__ for each in type(owner).__mro__ if each.__module__.startswith("pytorch_lightning"))
        yield from ((type(owner).__name__, _UNFIT[name]) for name in unfit if name in _UNFIT)
        stock = pl.Callback if isinstance(owner, pl.Callback) else pl.LightningModule
        for hook, instead in _UNCALLED.items():
            method = getattr(owner, hook, None)
            if method is not None and getattr(method, "__func__", method) is not getattr(stock, hook):
                yield f"{type(owner).__name__}.{hook}", instead
    if trainer._accelerator_connector._layer_sync is not None:
        yield "sync_batchnorm=True", "nothing: models here have no batch norm"


@final
class StartedProcesses(LightningEnvironment):
    """The processes that nxdt finds; Lightning, which looks for other launchers itself, refuses some of them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return whether another program has started this process as one of several."""
        return read_rank_environment().world_size > 1 or super().creates_processes_externally


@final
class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further rank, unless the ``Trainer`` asks for one process."""

    def __init__(self, environment: StartedProcesses, devices: int, nodes: int) -> None:
        super().__init__(environment, devices, nodes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes, then call ``function``.

        Raises:
            TrainerArgumentsIgnored: the ``Trainer`` asks for other numbers than the configuration.
        """
        asked = (1, 1) if trainer is None else asked_processes(trainer)
        if asked == (1, 1):
            return function(*args, **kwargs)
        if asked != (self.num_processes, self.num_nodes):
            argument = f"devices={asked[0]}, num_nodes={asked[1]}"
            instead = f"trainer.devices={asked[0]} and trainer.num_nodes={asked[1]} in the configuration"
            raise TrainerArgumentsIgnored(arguments=((argument, instead),))
        os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)

        def as_rank_zero(*args: Any, **kwargs: Any) -> Any:
            complete_variables()
            return function(*args, **kwargs)

        try:
            return super().launch(as_rank_zero, *args, trainer=trainer, **kwargs)
        except BaseException:
            self.kill(signal.SIGTERM)  # else they wait for this rank
            raise


def complete_variables() -> None:
    """Set ``RANK`` in a process of :class:`ScriptLauncher`: Lightning's launcher leaves it out."""
    given = os.environ
    if "RANK" in given or not {"NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= given.keys():
        return
    given["RANK"] = str(int(given["NODE_RANK"]) * int(given["LOCAL_WORLD_SIZE"]) + int(given["LOCAL_RANK"]))
