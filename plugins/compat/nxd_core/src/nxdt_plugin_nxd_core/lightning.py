"""NxD Core's names for PyTorch Lightning: a ``Trainer`` over a module that the caller's ``model_fn`` builds.

The classes of Lightning itself, with :class:`NxdtStrategy` in the place of the XLA strategy. Steps
are those of a loop of the caller's own (:class:`nxdt_plugin_nxd_core.NxDModel`); the dataloaders are the caller's, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytorch_lightning as pl
import torch
from nxdt_plugin_lightning.errors import TrainerArgumentsIgnored
from nxdt_plugin_lightning.strategy import EngineAccelerator, NxdtStrategy, asked_processes
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.connectors.data_connector import _get_distributed_sampler
from pytorch_lightning.utilities.data import _update_dataloader, has_iterable_dataset  # type: ignore[attr-defined]
from pytorch_lightning.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from nxdt_core.checkpoint import Manifest
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_plugin_nxd_core.arguments import binds, check, refused
from nxdt_plugin_nxd_core.builder import loss_in
from nxdt_plugin_nxd_core.config import NxDConfig, config_of, current_config, neuronx_distributed_config
from nxdt_plugin_nxd_core.model import initialize_parallel_model
from nxdt_plugin_nxd_core.optimizer import initialize_parallel_optimizer
from nxdt_plugin_nxd_core.tags import content_of, restore

__all__ = [
    "NeuronLTModule",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
    "NeuronXLAPrecisionPlugin",
    "NeuronXLAStrategy",
]


class NeuronLTModule(pl.LightningModule):
    """A Lightning module whose model, optimizer and schedule callables make.

    ``training_step`` runs forward and backward on a batch, which is a mapping of the keyword arguments of the model's
    ``forward`` or a sequence of its positional ones, and steps after every ``grad_accum_steps`` batches. A subclass may
    override it, ``setup``, ``configure_optimizers`` and every hook of Lightning.

    Args:
        model_fn: returns the module; may be None where a subclass overrides ``setup``.
        opt_cls, opt_args, opt_kwargs: called with the parameters first.
        scheduler_cls, scheduler_args, scheduler_kwargs: called with the optimizer first.
        grad_accum_steps: batches per optimizer step; in a pipeline, ``num_microbatches`` says it.
        train_batch_size, logging_interval: kept for the steps of a subclass.
    """

    loss: torch.Tensor | None = None
    """Mean loss of the last optimizer step."""
    lr: float | None = None
    """Learning rate of the last optimizer step."""
    global_norm: torch.Tensor | None = None
    """Norm of the gradients of the last optimizer step, before clipping."""
    input_ids: torch.Tensor | None = None
    """For a subclass."""
    should_print = False

    @binds
    def __init__(
        self,
        model_fn: Any = None,
        nxd_config: Any = None,
        opt_cls: Any = None,
        scheduler_cls: Any = None,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] = {},
        opt_args: Sequence[Any] = (),
        opt_kwargs: Mapping[str, Any] = {},
        scheduler_args: Sequence[Any] = (),
        scheduler_kwargs: Mapping[str, Any] = {},
        grad_accum_steps: int = 1,
        log_rank0: bool = False,
        train_batch_size: int = 16,
        logging_interval: int = 1,
    ) -> None:
        super().__init__()
        self.nxd_config = config_of(nxd_config, "NeuronLTModule")
        check("NeuronLTModule", "opt_cls", opt_cls)
        check("NeuronLTModule", "scheduler_cls", scheduler_cls)
        if self.nxd_config.stages > 1 and grad_accum_steps > 1:
            raise refused("NeuronLTModule", "grad_accum_steps", grad_accum_steps)
        self.automatic_optimization = False
        self.model_fn, self.model_args, self.model_kwargs = model_fn, tuple(model_args), dict(model_kwargs)
        self.opt_cls, self.opt_args, self.opt_kwargs = opt_cls, tuple(opt_args), dict(opt_kwargs)
        self.scheduler_cls = scheduler_cls
        self.scheduler_args, self.scheduler_kwargs = tuple(scheduler_args), dict(scheduler_kwargs)
        self.grad_accum_steps, self.log_rank0 = grad_accum_steps, log_rank0
        self.train_batch_size, self.logging_interval = train_batch_size, logging_interval

    def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
        """Build the model on this rank, unless it exists already. Collective."""
        if getattr(self, "model", None) is None:
            check("NeuronLTModule", "model_fn", self.model_fn)
            kwargs = {"include_buffers": include_buffers, **self.model_kwargs}
            self.model = initialize_parallel_model(self.nxd_config, self.model_fn, *self.model_args, **kwargs)
        self.averaged_loss = torch.zeros(1, dtype=torch.double, device=self.nxd_config.engine.device)
        self.print_pp_rank = 0 if self.log_rank0 else self.nxd_config.stages - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the groups of :meth:`get_param_groups_by_weight_decay`, and the schedule."""
        names = [*inspect.signature(self.opt_cls).parameters][1:]
        if len(self.opt_args) > len(names):
            details = {"of": self.opt_cls, "count": len(names), "names": ", ".join(names)}
            raise refused("NeuronLTModule", "opt_args", self.opt_args, **details)
        options = {**dict(zip(names, self.opt_args, strict=False)), **self.opt_kwargs}
        groups = self.get_param_groups_by_weight_decay()
        optimizer = initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **options)
        try:
            scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        except TypeError as error:
            arguments = (*self.scheduler_args, *self.scheduler_kwargs)
            name = getattr(self.scheduler_cls, "__name__", self.scheduler_cls)
            raise refused("NeuronLTModule", "scheduler_kwargs", arguments, error=error, of=name) from error
        return [optimizer], [{"scheduler": scheduler}]

    def get_param_groups_by_weight_decay(self) -> list[dict[str, Any]]:
        """Return this rank's parameters in two groups: with a weight decay of 0.01, and biases and norms without."""
        named = [("bias" in name or "norm" in name, parameter) for name, parameter in self.named_parameters()]
        return [
            {"params": [parameter for exempt, parameter in named if not exempt], "weight_decay": 0.01},
            {"params": [parameter for exempt, parameter in named if exempt], "weight_decay": 0.0},
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run forward and backward, and step after every ``grad_accum_steps`` batches. Collective."""
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        args = () if kwargs else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if self.nxd_config.stages > 1:
            self.averaged_loss += self.model.run_train(*args, **kwargs).detach()
        else:
            loss = loss_in(self.model(*args, **kwargs), self.model.loss_place) / self.grad_accum_steps
            loss.backward()  # type: ignore[no-untyped-call]
            self.averaged_loss += loss.detach()
        self.should_print = (batch_idx + 1) % self.grad_accum_steps == 0
        if not self.should_print:
            return
        optimizer, scheduler = cast(Any, self.optimizers()), cast(Any, self.lr_schedulers())
        self.lr = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        self.loss = self.trainer.strategy.reduce(self.averaged_loss.clone(), reduce_op="mean").squeeze()
        self.global_norm = optimizer.grad_norm
        self.averaged_loss.zero_()
        self.log_dict({"loss": self.loss, "global_norm": self.global_norm}, prog_bar=True, batch_size=1)
        self.log("lr", self.lr, prog_bar=True, batch_size=1)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the optimizer's step clips, as ``optimizer_config`` says."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield this rank's parameters under their names in the whole model."""
        return self.model.named_parameters(*args, **kwargs) if hasattr(self, "model") else iter(())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shards of the model by name."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into the model; see :meth:`nxdt_plugin_nxd_core.NxDModel.load_state_dict`."""
        return self.model.load_state_dict(state_dict, strict=strict)

    def load_saved(self, storage: CheckpointStore, manifest: Manifest) -> None:
        """Load model, optimizer and schedule; called by the strategy. Collective."""
        restore(self.nxd_config.session.load_checkpoint(storage, manifest), *self._trained_by())

    def save(self, uri: str, *, lightning: dict[str, Any]) -> Manifest:
        """Commit model, optimizer, schedule and Lightning's loops under ``uri``; called by the strategy. Collective."""
        session = self.nxd_config.session
        storage, _ = build.locate(session.config, uri)
        content = content_of("", *self._trained_by(), None)
        return session.save(storage, extra={**content, "lightning": lightning})

    def _trained_by(self) -> tuple[Any, Any]:
        schedules = (config.scheduler for config in self.trainer.strategy.lr_scheduler_configs)
        return next(iter(self.trainer.strategy.optimizers), None), next(schedules, None)


class NeuronXLAStrategy(NxdtStrategy):
    """The strategy of a ``Trainer`` for a :class:`NeuronLTModule`; torchrun or srun starts one process per rank.

    Args:
        nxd_config: of ``neuronx_distributed_config``; None takes that of the module.
        tensor_parallel_size, pipeline_parallel_size: sizes of the layout where ``nxd_config`` is None.

    Raises:
        ArgumentMeansNothing: a configuration of another kind.
    """

    strategy_name = "neuron_xla"

    @binds
    def __init__(self, nxd_config: Any = None, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
        sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        if nxd_config is None:
            nxd_config = current_config() or neuronx_distributed_config(tensor_parallel_size, pipeline_parallel_size)
            for argument, size in sizes.items():
                if size not in (1, nxd_config[argument]):
                    raise refused("NeuronXLAStrategy", argument, size, size=nxd_config[argument])
        self.nxd_config: NxDConfig = config_of(nxd_config, "NeuronXLAStrategy")
        super().__init__(self.nxd_config.session.config, engine=self.nxd_config.engine)
        self._accelerator, self._samples = EngineAccelerator(self.engine.device), False
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        place, run = self.engine.rank_info, self.nxd_config
        self.tensor_parallel_size, self.tensor_parallel_rank = run["tensor_parallel_size"], run.rank("tp")
        self.pipeline_parallel_size, self.pipeline_parallel_rank = run.stages, run.rank("pp")
        self.data_parallel_size, self.data_parallel_rank = place.dp_size, place.dp_rank

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module that the trainer was given, and its configuration.

        Raises:
            ArgumentMeansNothing: it is not a :class:`NeuronLTModule`, or has another configuration.
            TrainerArgumentsIgnored: arguments of the ``Trainer`` whose work is done elsewhere.
        """
        Strategy.connect(self, model)
        if not isinstance(model, NeuronLTModule):
            raise refused("NeuronXLAStrategy", "model", type(model).__name__)
        if model.nxd_config is not self.nxd_config:
            raise refused("NeuronLTModule", "nxd_config", "another one")
        model._device = self.root_device  # where initialize_parallel_model places the model
        trainer, world, ignored = model.trainer, self.engine.rank_info.world_size, list[tuple[str, str]]()
        if trainer.precision != "32-true":
            ignored.append((f"precision={trainer.precision!r}", "the dtype of the module that model_fn returns"))
        devices, nodes = asked_processes(trainer)
        if devices * nodes not in (1, world):
            instead = f"numbers that agree with the {world} processes that torchrun or srun started"
            ignored.append((f"devices={devices}, num_nodes={nodes}", instead))
        if trainer._accelerator_connector._layer_sync is not None:
            ignored.append(("sync_batchnorm=True", "nothing: each rank normalises its own batches"))
        if ignored:
            raise TrainerArgumentsIgnored(arguments=tuple(ignored))
        if trainer._accelerator_connector.use_distributed_sampler:  # Lightning samples for its own strategies alone
            self._samples, trainer._accelerator_connector.use_distributed_sampler = True, False

    def process_dataloader(self, dataloader: object) -> object:
        """Return the dataloader with this rank's share of what its sampler draws, as Lightning shares it; one with a
        ``DistributedSampler`` unchanged, and after ``Trainer(use_distributed_sampler=False)`` every one."""
        if (
            not self._samples
            or self.engine.rank_info.world_size == 1
            or not isinstance(dataloader, DataLoader)
            or isinstance(dataloader.sampler, DistributedSampler)
            or has_iterable_dataset(dataloader)
        ):
            return dataloader
        stage = cast(pl.LightningModule, self.lightning_module).trainer.state.stage
        ranks = {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}
        sampler = _get_distributed_sampler(dataloader, isinstance(dataloader.sampler, RandomSampler), 0, stage, **ranks)
        return _update_dataloader(dataloader, sampler, stage)


class NeuronXLAPrecisionPlugin(Precision):
    """Lightning's plugin that changes nothing: the dtype of the module decides."""

    @binds
    def __init__(self) -> None:
        super().__init__()


class NeuronTQDMProgressBar(TQDMProgressBar):
    """Lightning's progress bar, on rank 0: the loss is the same on all ranks."""


class NeuronTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger, on rank 0, with the arguments of Lightning's; a module may set the step that it logs at."""

    print_step: int | None = None
    """The step to log at; below 0 nothing is logged; None is Lightning's step."""

    @binds
    def __init__(self, save_dir: Any, **kwargs: Any) -> None:
        super().__init__(save_dir=save_dir, **kwargs)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars at ``print_step``, or at ``step`` where that is None."""
        if self.print_step is None or self.print_step >= 0:
            super().log_metrics(dict(metrics), step if self.print_step is None else self.print_step)
