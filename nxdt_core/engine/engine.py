"""The engine on stock torch: joins the process group, builds the mesh, lays models out and optimizes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import configure_allocator, current_device, profile_of, register_profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.engine.compile_cache import ahead_of, use_cache
from nxdt_core.engine.data.fsdp import WeightStorage
from nxdt_core.engine.layout import LayoutOptions, parallelize
from nxdt_core.engine.layout import materialise as materialise_layout
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.model import ComputeContext, TorchModel
from nxdt_core.engine.optim.optimizer import TorchOptimizer
from nxdt_core.engine.optim.updates import Backend, backend_on, updates_rounded
from nxdt_core.engine.parameters import check_overrides, parameter_groups, tables
from nxdt_core.models.quantised import load_library
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.engine import CompileAhead, ParallelEngine, RankInfo
from nxdt_core.protocols.estimate import Estimate, RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.system.progress import PROGRESS


class TorchEngine(ParallelEngine):
    """Built-in ``engine``; see :class:`nxdt_core.protocols.engine.ParallelEngine`."""

    mesh: ParallelMesh
    """Known after :meth:`start`."""
    ranks: Ranks

    def __init__(self, config: ResolvedConfig) -> None:
        self._run = config.run
        self.ranks = Ranks.from_environment()
        self.device = current_device(
            config.run.trainer.accelerator, index=self.ranks.local_rank if self.ranks.world_size > 1 else None
        )
        profile = profile_of(self.device)
        if config.run.model.compile:
            use_cache(config.run, profile)
        configure_allocator(config.run.trainer, profile)  # before anything is on the device
        if profile.reduced_float32_matmul:
            torch.set_float32_matmul_precision(config.run.trainer.float32_matmul_precision)
        self._sizes = config.run.distributed_strategy.mesh_sizes(self.ranks.world_size)
        self._models: WeakSet[TorchModel] = WeakSet()
        position = ParallelMesh(self._sizes, None, rank=self.ranks.rank)
        self.rank_info = RankInfo(
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            local_rank=self.ranks.local_rank,
            dp_rank=position.rank("dp"),
            dp_size=self._sizes.dp,
            mesh=self._sizes.as_dict(),
        )

    def start(self) -> None:
        """Join the process group, if there is more than one process, and build the mesh."""
        self.ranks.start(self.device, timeout_s=self._run.distributed_strategy.timeout_s)
        self.mesh = ParallelMesh.build(self._sizes, self.device.type, timeout_s=self.ranks.collective_timeout_s)

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Sequence[Adapter] = (),
        materialise: bool = True,
        frozen: bool = False,
    ) -> TorchModel:
        """Build this rank's part of the model on the device. ``materialise=False`` leaves its values undefined for a
        load, except those that adapters added. A ``frozen`` model is another one than that of the run.

        Raises:
            NxdtError: the model's plan does not allow the layout.
            GradientSumsRounded: the layout does not keep sums of gradients as ``precision`` says.
        """
        data = self._run.data
        options = LayoutOptions.of(self._run, profile_of(self.device), self._sizes)
        storage = WeightStorage.of(self._sizes, precision, micro_batches=options.micro_batches or 1)
        if storage.sharded and self.ranks.world_size == 1:  # for gradients' dtype
            self.ranks.start_alone(self.device)
            self.mesh = ParallelMesh.build(self._sizes, self.device.type, timeout_s=self.ranks.collective_timeout_s)
        if self._run.adapter.base_dtype is not None:
            load_library()
        if frozen:
            options = options.of_frozen()
        layout = parallelize(builder, self.mesh, options, precision, adapters)
        PROGRESS.spent("build")
        materialise_layout(layout, self.device, seed=seed, base=materialise)
        pins = profile_of(self.device).pinned_host_memory and data.pin_memory is not False
        compute = ComputeContext(precision, self.device, seed, options.row_kernels, pins=pins)
        model = TorchModel(layout, self.mesh, compute)
        self._models.add(model)
        return model

    def initialize_optimizer(
        self, model: TorchModel, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> TorchOptimizer:
        """Build the optimizer over this rank's shards of the model's parameters, in groups. Collective.

        Raises:
            ParameterGroupEmpty: a pattern of ``model.optim.param_groups`` chooses no parameter on any rank.
            OptimizerNeedsWholeParameters: the optimizer would take shards for wholes.
        """
        overrides = self._run.model.optim.param_groups
        if overrides:
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            check_overrides(overrides, trained, self.ranks)
        groups = parameter_groups(
            model.named_parameters(),
            model.plan,
            lr=config.lr,
            weight_decay=getattr(config, "weight_decay", 0.0),
            decay_norms=decay_norms,
            overrides=overrides,
        )
        rounding = updates_rounded(model.precision, self._run.seed)
        backend: Backend = backend_on(self.device) if rounding or self._run.model.compile else "eager"
        if (rounding or self._run.model.compile) and not profile_of(self.device).host:  # bits depend on it elsewhere
            backend = "compile" if {*self.ranks.all_gather_object(backend)} == {"compile"} else "eager"
        return TorchOptimizer(
            lambda shards: factory(shards, config),
            groups,
            model.finish_gradients,
            after_step=model.sync_tied_copies,
            padded=model.padded,
            tables=tables(model.local_modules(), model.plan),
            rounding=rounding,
            backend=backend,
            before_step=model.begin_step,
            lr=config.lr,
            never_waits=profile_of(self.device).never_waits,
        )

    @classmethod
    def estimate(cls, config: ResolvedConfig, parts: RunParts) -> Estimate:
        """Return what the run of ``config`` would need, measured without devices.

        Raises:
            NxdtError: the run would not start.
        """
        from nxdt_core.engine.estimate.rank import workload_of
        from nxdt_core.engine.estimate.run import estimate

        return estimate(workload_of(config, parts))

    @classmethod
    def compile_ahead(cls, config: ResolvedConfig) -> CompileAhead:
        """Return how a trial of the run of ``config`` fills the cache of ``torch.compile``.

        Raises:
            CompileIsOff: ``model.compile`` is false.
            NxdtError: there is no such device, or the cache cannot be written.
        """
        register_profile_of(config)
        return ahead_of(config.run, profile_of(current_device(config.run.trainer.accelerator)))

    @classmethod
    def local_elements(cls, builder: ModelBuilder, sizes: MeshSizes) -> Mapping[str, int]:
        """Return the number of elements of each parameter on rank 0 of ``sizes``, measured on the meta device.

        Raises:
            NxdtError: the model's plan does not allow the layout.
        """
        from nxdt_core.engine.estimate.rank import fake_mesh

        with fake_mesh(sizes) as mesh:
            (module,) = parallelize(builder, mesh, LayoutOptions(), PrecisionPolicy(name="fp32")).modules
            return {name: local_of(parameter).numel() for name, parameter in module.named_parameters()}

    def shutdown(self) -> None:
        """Leave the process group; may be called twice."""
        for model in self._models:  # NCCL waits for the end of recordings with its collectives
            model.forget_passes()
        self.ranks.stop()
