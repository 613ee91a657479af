"""Lightning's strategy over a parallel engine: placement, the optimizer step, and checkpoints without pickles; with the
accelerator for device types that Lightning does not know, checks of a user's Trainer, and the launcher that lets nxdt
start the processes."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property
from importlib.metadata import version
from typing import Any, cast, final

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from pytorch_lightning.trainer import call
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest
from nxdt_core.checkpoint.read.status import newest_first
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build, start_engine
from nxdt_plugin_lightning.errors import NotOurModule, TrainerArgumentsIgnored
from nxdt_plugin_lightning.module import NxdtModule

_log = logging.getLogger(__name__)

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


@final
class EngineAccelerator(Accelerator):
    """The device of a parallel engine, which has chosen it; Lightning decides nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def setup_device(self, device: torch.device) -> None:
        """Let the process use the device."""
        if device.index is not None:
            profile_of(device).operations.set_index(device.index)

    def teardown(self) -> None:
        """Do nothing: the engine leaves its device."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the highest memory use, for Lightning's ``DeviceStatsMonitor``."""
        peak = profile_of(self._device).operations.max_memory_bytes(self._device)
        return {} if peak is None else {"max_memory_bytes": peak}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return ``devices``: a process has one."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return nothing: the strategy has the engine's device."""
        return []

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: each process has one device."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: the engine has refused a device that is not there."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name that Lightning logs."""
        return "engine"


def asked_processes(trainer: pl.Trainer) -> tuple[int, int]:
    """Return ``devices`` and ``num_nodes`` as they were given; ``trainer.num_devices`` is 1 for any own strategy."""
    connector = trainer._accelerator_connector
    devices = connector._devices_flag
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return count, int(connector._num_nodes_flag)


def _ignored(trainer: pl.Trainer, world_size: int, passes: int | None) -> Iterator[tuple[str, str]]:
    """Yield arguments, and what does their work here; ``passes`` are those of the configuration."""
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
        unfit = (cls.__name__ for cls in type(owner).__mro__ if cls.__module__.startswith("pytorch_lightning"))
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


class NxdtStrategy(Strategy):
    """Drives a :class:`NxdtModule` in any ``Trainer``: ``Trainer(strategy=NxdtStrategy(config), accelerator=…)``.

    The ranks are those that torchrun or another launcher has started; ``devices`` is then their number on each node, or
    1. Where none has, ``Trainer(devices=N)`` starts N processes of the same script.

    Paths of Lightning's checkpoints become checkpoint URIs of ours: ``trainer.save_checkpoint`` and
    ``fit(ckpt_path=…)`` write and read our format.

    It has no ``world_size`` for Lightning to see (``engine.rank_info`` has it): above 1, Lightning broadcasts a tensor
    and waits for the device before every batch, and broadcasts from within its handler of SIGTERM.
    """

    strategy_name = "nxdt"

    def __init__(self, config: ResolvedConfig, *, engine: ParallelEngine | None = None) -> None:
        """``engine``: one that was started elsewhere and is closed there; None builds the configured one."""
        super().__init__()
        self.config = config
        if engine is not None:
            self.engine = engine
        self._started, self._broken = engine is not None, False
        self._launcher: ScriptLauncher | None = None
        self.resumes: tuple[CheckpointStore, Manifest] | None = None
        """The checkpoint that the trainer was given; it is loaded once model and optimizer exist."""
        self.cluster_environment = StartedProcesses()
        complete_variables()
        if engine is None and not self._may_launch:
            build.check_world_size(config)

    @cached_property
    def engine(self) -> ParallelEngine:
        """Return the configured one, built once the processes run.

        Raises:
            WorldSizeMismatch: their number is not that of the configuration.
        """
        build.check_world_size(self.config)
        return build.engine(self.config)

    @property
    def _may_launch(self) -> bool:
        """True if this process is the only one so far of a run of several."""
        trainer = self.config.run.trainer
        return trainer.devices > 1 and read_rank_environment().world_size == 1

    def _configure_launcher(self) -> None:
        """Let Lightning start the other processes, where none has; called by the ``Trainer``."""
        if "engine" not in vars(self) and self._may_launch:
            trainer = self.config.run.trainer
            self._launcher = ScriptLauncher(self.cluster_environment, trainer.devices, trainer.num_nodes)

    @property
    def lightning_accelerator(self) -> str | Accelerator:
        """Value for the trainer's ``accelerator``: the name that Lightning has for the device type, or ours."""
        kind = self.engine.device.type
        return kind if kind in ("cpu", "cuda") else EngineAccelerator(self.engine.device)

    @property
    def root_device(self) -> torch.device:
        """Return the engine's device."""
        return self.engine.device

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Return whether there are other ranks, so that Lightning reduces what is logged with ``sync_dist=True``."""
        return self.engine.ranks.world_size > 1

    @property
    def global_rank(self) -> int:
        """Return the number of this process among all."""
        return self.engine.rank_info.rank if self._started else read_rank_environment().rank

    @property
    def local_rank(self) -> int:
        """Return the number of this process among those of its node."""
        return self.engine.rank_info.local_rank

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: model and optimizer exist before anything is loaded."""
        return True

    def start(self) -> None:
        """Start the engine and compare what all ranks are about to run; collective. A second call does nothing.

        Raises:
            RanksDisagree: they would not run the same.
        """
        if not self._started:
            self._started = True
            if self.engine.rank_info.world_size > 1:
                atexit.register(self.close)
            start_engine(self.config, self.engine)

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module that the trainer was given.

        Raises:
            NotOurModule: the model is not an :class:`NxdtModule`.
            TrainerArgumentsIgnored: arguments whose work the configuration decides, callbacks that cannot work, or
                hooks that nothing calls.
        """
        super().connect(model)
        trainer = model.trainer
        if not isinstance(model, NxdtModule):
            raise NotOurModule(found=type(model).__name__)
        passes = self.config.run.trainer.max_epochs
        if ignored := tuple(_ignored(trainer, self.engine.rank_info.world_size, passes)):
            raise TrainerArgumentsIgnored(arguments=ignored)
        if trainer.max_steps == -1 and trainer.max_epochs in (None, 1000):  # neither is given
            trainer.fit_loop.epoch_loop.max_steps = self.config.run.trainer.max_steps
            trainer.fit_loop.max_epochs = -1  # else Lightning resets the data to count them (its issue 20550)
        trainer._accelerator_connector.use_distributed_sampler = False  # it samples for its own strategies alone

    def setup_environment(self) -> None:
        """Start the engine before any hook runs."""
        self.start()
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Build the optimizer; the engine has placed the model already."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Do nothing: the engine builds the model on its device."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a block that changes nothing: the engine names devices itself, and draws weights without hooks."""
        return nullcontext()

    def teardown(self) -> None:
        """Release what Lightning holds. The optimizer's state stays on its device: Lightning would copy all of it into
        the host's memory, 32 GB for 8B weights in bfloat16, before the process ends."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the hooks ``on_before_optimizer_step``, then let the parallel optimizer step, or ``optimizer`` of a
        module that is not an :class:`NxdtModule`; called by Lightning, which counts the step."""
        trainer = self._module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        module = self.lightning_module
        return (module.optimizer if isinstance(module, NxdtModule) else optimizer).step()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:  # the names are Lightning's
        """Commit a checkpoint under the URI ``filepath`` (a root, or a root with ``step-…`` behind it)."""
        # Tensors are saved in another way.
        heavy = {"state_dict", "optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters"}
        lightning = {key: value for key, value in checkpoint.items() if key not in heavy}
        self._module.save(str(filepath), lightning=lightning)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Find the checkpoint and return what Lightning itself had saved; tensors are loaded after set-up."""
        storage, step = build.locate(self.config, str(checkpoint_path))
        trusted = build.trusted_keys(self.config)
        manifest = checkpoint.find_checkpoint(storage, step, warn=_log.warning, trusted=trusted)
        self.resumes = storage, manifest
        saved = checkpoint.load_state(storage, manifest)
        lightning: dict[str, Any] = saved["extra"].get("lightning", {})
        if "lightning" not in saved["extra"]:  # no run of ours wrote it: Lightning's loops, at the step
            loops = deepcopy(self._module.trainer.fit_loop.state_dict())
            for count in loops["epoch_loop.manual_optimization.optim_step_progress"].values():
                count.update(ready=manifest.step, completed=manifest.step)
            lightning = {"pytorch-lightning_version": version("pytorch-lightning"), "epoch": 0}
            lightning |= {"global_step": manifest.step, "loops": {"fit_loop": loops}}
        return {**lightning, "state_dict": {}, "optimizer_states": [], "lr_schedulers": []}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: weights are saved by the engine."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dictionary: optimizer state is saved by the engine."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, optimizer state, counters and generators of the checkpoint found before."""
        assert self.resumes is not None
        resumes, self.resumes = self.resumes, None
        self._module.load_saved(*resumes)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: optimizer state is loaded together with the weights."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete the step that ``filepath`` names, or every step of the root that it names."""
        if self.is_global_zero:
            storage, step = build.locate(self.config, str(filepath))
            steps = [status.step for status in newest_first(storage, names_only=True)] if step is None else [step]
            for number in steps:
                checkpoint.delete_step(storage, number)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean (or ``reduce_op``: ``sum``, ``min``, ``max``, ``product``) of a tensor over all ranks.

        For figures that a user's callbacks log; what the engine returns is reduced already.
        """
        if not isinstance(tensor, torch.Tensor) or self.engine.ranks.world_size == 1:
            return tensor
        mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg")
        operation = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not mean else reduce_op
        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, op=dist.ReduceOp.SUM if mean else operation, group=group)
        return reduced / dist.get_world_size(group) if mean else reduced

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension; of equal shapes."""
        if self.engine.ranks.world_size == 1:
            return tensor
        if sync_grads:
            parts = all_gather_with_gradients(tensor, group=group or dist.group.WORLD)  # type: ignore[no-untyped-call]
            return torch.stack(list(parts))
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this."""
        self.engine.ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        return self.engine.ranks.broadcast_object(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any."""
        return not self.engine.ranks.any_rank(not decision) if all else self.engine.ranks.any_rank(decision)

    def on_exception(self, exception: BaseException) -> None:
        """Remember it: the groups stay. Leaving them waits for ranks that are stuck in them, or fails those, too."""
        self._broken = True
        if isinstance(self.lightning_module, NxdtModule):
            self.lightning_module.session.collections.close()

    def close(self) -> None:
        """Stop the engine: after the last of ``fit``, ``validate``, ``test`` and ``predict``, whose model it holds.

        A process that ends does this by itself. A second call does nothing.
        """
        atexit.unregister(self.close)
        if not self._broken or self.engine.ranks.world_size == 1:
            self.engine.shutdown()
            self._started = False

    @property
    def _module(self) -> NxdtModule:
        return cast("NxdtModule", self.lightning_module)


def complete_variables() -> None:
    """Set ``RANK`` in a process of :class:`ScriptLauncher`: Lightning's launcher leaves it out."""
    if "RANK" not in os.environ and {"NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= os.environ.keys():
        node, count, local = (int(os.environ[name]) for name in ("NODE_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"))
        os.environ["RANK"] = str(node * count + local)
