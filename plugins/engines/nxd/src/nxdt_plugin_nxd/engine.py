"""The engine: joins the process group, sets up the library's groups, builds models and optimizers on its layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.engine.parameters import check_overrides, parameter_groups
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.engine import CompileAhead, ParallelEngine, RankInfo
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_plugin_nxd.errors import RanksPlacedOtherwise
from nxdt_plugin_nxd.hardware import Machine, check_layout, machine_of_product, position_of
from nxdt_plugin_nxd.lazy_device import end_of_step, join_processes, lazy_device
from nxdt_plugin_nxd.library import (
    ahead_of,
    apply_environment,
    check_cache,
    computes_on_host,
    load_library,
    platform,
    variables_of,
)
from nxdt_plugin_nxd.translation import MeshCoordinates

if TYPE_CHECKING:
    from nxdt_plugin_nxd.model import NxdModel, NxdOptimizer


_LOCAL_RANKS = "LOCAL_WORLD_SIZE"


class NxdEngine(ParallelEngine):
    """``parallel_engine.name=nxd``; see :class:`nxdt_core.protocols.engine.ParallelEngine`."""

    _started: ClassVar[int] = 0
    """Engines of this process that are running; the library's groups are the process's."""
    _sets_local_ranks: ClassVar[bool] = False
    """True if the first of them has set the variable that the library reads."""

    device: torch.device
    rank_info: RankInfo
    ranks: Ranks

    def __init__(self, config: ResolvedConfig) -> None:
        """Set the variables that a configuration asks for and import the library, which reads them.

        Raises:
            NxdtError: the library cannot be imported, or the cache of compiled graphs cannot be used.
        """
        run = config.run
        apply_environment(variables_of(config), os.environ)
        load_library()
        if run.compiler_cache_url is not None and not computes_on_host():
            check_cache()
        super().__init__(config)
        self.ranks = Ranks.from_environment()
        self._sizes = run.distributed_strategy.mesh_sizes(self.ranks.world_size)
        self._machine = Machine.of(platform(), run.trainer.devices)
        if not computes_on_host():
            check_layout(self._sizes, self._machine)
        self.place = MeshCoordinates.of(position_of(self.ranks.rank, self._sizes, self._machine), self._sizes)
        self.device = HOST if computes_on_host() else lazy_device()
        self.rank_info = RankInfo(
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            local_rank=self.ranks.local_rank,
            dp_rank=self.place.dp,
            dp_size=self._sizes.dp,
            mesh=self._sizes.as_dict(),
        )
        self._running = False

    def start(self) -> None:
        """Join the process group and build the library's groups.

        Raises:
            RanksPlacedOtherwise: the library arranges the ranks in another order.
        """
        if self._running:
            return
        if self.ranks.world_size > 1 and not computes_on_host() and not dist.is_initialized():
            join_processes()  # the ranks then use an additional group of hosts to agree
        self.ranks.start(HOST, timeout_s=self.config.run.distributed_strategy.timeout_s)
        if not dist.is_initialized():  # the library asks for a group in a single process, too
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self._running = True
        NxdEngine._started += 1
        from neuronx_distributed.parallel_layers import parallel_state

        if _LOCAL_RANKS not in os.environ:  # not every launcher sets it
            os.environ[_LOCAL_RANKS] = str(self._machine.processes)
            NxdEngine._sets_local_ranks = True
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._sizes.tp,
            pipeline_model_parallel_size=self._sizes.pp,
            expert_model_parallel_size=self._sizes.ep,
            skip_collective_init=computes_on_host() or self.ranks.world_size == 1,
            lnc_size=self._machine.lnc,
        )
        placed = {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
        }
        if placed != self.place.as_dict():
            raise RanksPlacedOtherwise(rank=self.ranks.rank, library=placed, run=self.place.as_dict())

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Sequence[Adapter] = (),
        materialise: bool = True,
        frozen: bool = False,
    ) -> NxdModel:
        """Build this rank's part on the device; ``materialise=False`` leaves its values undefined for a load, but for
        those that adapters added.

        Raises:
            NxdtError: the model's plan, or the library, does not allow the layout.
        """
        from neuronx_distributed.parallel_layers import parallel_state

        from nxdt_plugin_nxd import layout
        from nxdt_plugin_nxd.model import NxdModel
        from nxdt_plugin_nxd.passes import ComputeContext

        fixed_shapes = not profile_of(self.device).host
        stage = layout.parallelize(builder, self.place, self.config, precision, adapters, fixed_shapes=fixed_shapes)
        copies = max((shard.copies for shard in stage.shards.values()), default=1)
        if max(self.ranks.all_gather_object(copies)) > 1:  # a stage may have no attention
            parallel_state.initialize_kv_group(copies, sequential_ranks_in_group=True)
        layout.materialise(stage, self.place, self.device, seed=seed, base=materialise)
        sizes = self._sizes
        compute = ComputeContext(
            device=self.device,
            seed=seed,
            place=self.place,
            data_group=parallel_state.get_data_parallel_group() if sizes.dp > 1 else None,
            pipeline_group=parallel_state.get_pipeline_model_parallel_group() if sizes.pp > 1 else None,
            ranks=self.ranks,
            dtype=None if precision.autocast is None else getattr(torch, precision.autocast),
        )
        sequence_parallel = self.config.run.distributed_strategy.sequence_parallel
        model = NxdModel(stage, compute, precision, sequence_parallel=sequence_parallel)
        end_of_step(self.device)  # keeps weight initialization out of the first step's graph
        return model

    def initialize_optimizer(
        self, model: NxdModel, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> NxdOptimizer:
        """Build the optimizer over this rank's parameters, in groups. Collective.

        Raises:
            ParameterGroupEmpty: a pattern of ``model.optim.param_groups`` chooses no parameter on any rank.
        """
        from nxdt_plugin_nxd.model import NxdOptimizer

        overrides = self.config.run.model.optim.param_groups
        check_overrides(overrides, [name for name, p in model.named_parameters() if p.requires_grad], self.ranks)
        groups = parameter_groups(
            model.named_parameters(),
            model.plan,
            lr=config.lr,
            weight_decay=getattr(config, "weight_decay", 0.0),
            decay_norms=decay_norms,
            overrides=overrides,
        )
        return NxdOptimizer(model, lambda shards: factory(shards, config), groups, lr=config.lr)

    @classmethod
    def compile_ahead(cls, config: ResolvedConfig) -> CompileAhead:
        """Return how neuron_parallel_compile fills the Neuron cache for the run of ``config``.

        Raises:
            NxdtError: nothing is compiled, the tool is missing, or the cache cannot be used.
        """
        return ahead_of(config)

    @classmethod
    def check_product(cls, config: ResolvedConfig, product: str) -> None:
        """See that the machines of a product run the layout of ``config``.

        Raises:
            LayoutNotOnHardware: they do not.
        """
        run = config.run
        sizes = run.mesh_sizes()
        check_layout(sizes, machine_of_product(product, run.trainer.devices))

    def shutdown(self) -> None:
        """Leave the process group; may be called twice."""
        if not self._running:
            return
        self._running = False
        NxdEngine._started -= 1
        if NxdEngine._started == 0:
            from neuronx_distributed.parallel_layers import parallel_state

            parallel_state.destroy_model_parallel()
            parallel_state.destroy_kv_group()
            if NxdEngine._sets_local_ranks:
                del os.environ[_LOCAL_RANKS]
                NxdEngine._sets_local_ranks = False
            if self.ranks.world_size == 1:
                dist.destroy_process_group()
        self.ranks.stop()
