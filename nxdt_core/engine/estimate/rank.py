"""The workload of an estimate: a model, its training and its layout, read from a configuration.

One pipeline rank on the meta device: its stages in their layout, and a micro-batch through each.

Its process group is stock torch's ``fake`` backend, of any size in one process; its collectives do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.device_settings import register_profile_of
from nxdt_core.distributed.devices import HOST, PROFILES, available_type, profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data.fsdp import (
    casts_once_per_step,
    gather_dtypes,
    leaves_experts_whole,
    needs_sharding,
    product_weights,
)
from nxdt_core.engine.decoding import attention_slots
from nxdt_core.engine.estimate.memory import (
    ParameterCounts,
    StateOf,
    StorageLayout,
    count_parameters,
    gathered_bytes,
    needs_stand_ins,
    optimizer_state,
)
from nxdt_core.engine.estimate.trace import (
    MicroBatchTrace,
    StageInput,
    keep_as_compiled,
    trace_forward,
    trace_micro_batch,
)
from nxdt_core.engine.layout import LayoutOptions, parallelize
from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.engine.model import objective_output
from nxdt_core.engine.optim.updates import updates_rounded
from nxdt_core.engine.shape_errors import name_shape_errors
from nxdt_core.errors.models import ModelReadsValues
from nxdt_core.models.attention.cache import cached_width
from nxdt_core.models.attention.grouped_query import AttentionSemantics
from nxdt_core.models.loss import RowKernels
from nxdt_core.models.patterns import matches
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.estimate import RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run, as far as its sizes depend on it."""

    builder: ModelBuilder
    teacher: ModelBuilder | None = None
    """Builder of a second model, which runs forward only."""
    adapters: Sequence[Adapter] = ()
    objective: Objective
    precision: PrecisionPolicy
    state: StateOf
    """Measures the optimizer state of a parameter."""
    stand_ins: bool = False
    """The optimizer works on float32 stand-ins of weights that are rounded."""
    sizes: MeshSizes
    options: LayoutOptions
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    saves_bfloat16: bool = False
    """Checkpoints also store wider weights in bfloat16."""
    records: bool = False
    """The device records passes of generation, whose cache is then kept during a step."""
    packed: bool = False
    """Samples hold several documents that do not see each other: attention then receives their ids."""

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per step and rank."""
        return self.global_batch_size // (self.micro_batch_size * self.sizes.dp)

    @property
    def storage(self) -> StorageLayout:
        """Return how the ranks hold parameters, gradients and optimizer state."""
        sizes = self.sizes
        return StorageLayout(
            policy=self.precision,
            zero_stage=sizes.zero_stage,
            sharded=needs_sharding(sizes, self.precision),
            replicated=sizes.fsdp * sizes.dp_replicate > 1,
            accumulates=self.micro_batches > 1,
            cast_once=casts_once_per_step(sizes, self.precision, micro_batches=self.micro_batches),
            stand_ins=self.stand_ins,
        )

    @property
    def rows(self) -> int:
        """Return the number of sequences per micro-batch."""
        return self.micro_batch_size * self._rows_per_sample

    @property
    def _rows_per_sample(self) -> int:
        traits = self.objective.traits
        return traits.loss_rows or traits.rows_per_sample

    def batch(self) -> Batch:
        """Return one micro-batch as a rank sees it, on the meta device."""

        def tokens() -> torch.Tensor:
            shape = self.rows, self.seq_length // self.sizes.cp
            return torch.empty(shape, dtype=torch.int64, device="meta")

        traits = self.objective.traits
        placed = self.sizes.cp > 1 or self.sizes.pp > 1 or self.packed
        return Batch(
            input_ids=tokens(),
            labels=tokens(),
            position_ids=tokens() if placed else None,
            document_ids=tokens() if self.packed else None,
            reference_log_probs=tokens().float() if traits.reference else None,
            values={name: tokens().float() for name in traits.values},
            rows_per_sample=self._rows_per_sample,
        )

    def hidden(self, size: int) -> torch.Tensor:
        """Hidden states of a micro-batch within pipeline stages, of width ``size``."""
        sequence = self.seq_length // self.sizes.cp
        if self.options.sequence_parallel:
            sequence //= self.sizes.tp
        dtype = getattr(torch, self.precision.parameters)
        return torch.empty(self.rows, sequence, size, dtype=dtype, device="meta")

    def hidden_bytes(self, size: int) -> int:
        """Return the bytes of :meth:`hidden` on their way to another stage; 0 where nothing travels."""
        return self.hidden(size).to(self.sent).nbytes if self.sizes.pp > 1 else 0

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matrix products under autocast; None without it."""
        return None if self.precision.autocast is None else getattr(torch, self.precision.autocast)

    @property
    def sent(self) -> torch.dtype:
        """Return the dtype in which hidden states travel between pipeline stages."""
        dtype: torch.dtype = self.autocast or getattr(torch, self.precision.parameters)
        return dtype


def workload_of(config: ResolvedConfig, parts: RunParts) -> Workload:
    """Return the sizes of the run of ``config``.

    Raises:
        NxdtError: the run would not start.
    """
    register_profile_of(config)
    run = config.run
    accelerator, device_type = run.trainer.accelerator, available_type()
    profile = PROFILES[device_type if accelerator == "auto" else accelerator]
    if accelerator == "auto" and profile.host:
        # The device type is not known: it promises nothing that a layout could do without, and has what takes memory.
        profile = replace(profile_of(torch.device("meta")), symmetric_memory=True, records=True)
    # Over masters and over rounded weights the optimizer sees float32.
    optimizer, policy = config.selected("optimizer"), parts.precision
    factory, rounding = optimizer.component.load_target(), updates_rounded(policy, run.seed)
    wide = policy.master_weights or rounding is not None
    dtype = torch.float32 if wide else getattr(torch, policy.parameters)
    two_byte = rounding is not None and rounding.state == "bfloat16"
    sizes = run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)
    return Workload(
        builder=parts.builder,
        teacher=parts.teacher,
        adapters=parts.adapters,
        objective=parts.objective,
        precision=parts.precision,
        state=optimizer_state(factory, optimizer.config, dtype, two_byte=two_byte, more=parts.extra_state_bytes),
        stand_ins=rounding is not None and needs_stand_ins(factory, optimizer.config),
        sizes=sizes,
        options=LayoutOptions.of(run, profile, sizes),
        micro_batch_size=run.data.micro_batch_size,
        global_batch_size=run.data.global_batch_size,
        seq_length=run.data.seq_length,
        saves_bfloat16=run.checkpoint.save_bf16,
        records=profile.records,
        packed=bool(getattr(config.selected("dataset").config, "reset_attention_mask", False)),
    )


_FAKE = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTeacher:
    """Bytes that a second model needs on one rank, which runs forward only; of a run without one there are none."""

    weights: int = 0
    """Bytes of its shard."""
    running: int = 0
    """Further bytes while it runs: gathered weights and hidden states."""
    kept: int = 0
    """Bytes of its logits of one micro-batch, as far as they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """Measurements of one rank."""

    counts: ParameterCounts
    """Elements of the parameters of all its stages."""
    traces: tuple[MicroBatchTrace, ...]
    """One per stage, ascending."""
    layers: int
    hidden_size: int
    """Width of what travels between stages; 0 without a pipeline."""
    teacher: MeasuredTeacher = MeasuredTeacher()
    cache: int = 0
    """Bytes of the keys and values of a micro-batch's answers; 0 where the model writes none."""


def measure_rank(work: Workload, pp_rank: int) -> MeasuredRank:
    """Lay out the stages of ``pp_rank`` and run a micro-batch through each.

    FSDP2 and compilation are left out: the first cannot run without memory and is counted by rules, and what compiled
    layers keep is made of layers as they are written (:func:`keep_as_compiled`).
    """
    compiled, storage = work.options.compile_backend is not None, work.storage
    options = replace(
        work.options, compile_backend=None, row_kernels=_IN_KERNELS if compiled else work.options.row_kernels
    )
    precision = replace(work.precision, master_weights=False, gradients=work.precision.parameters)
    sizes = replace(work.sizes, zero_stage=0)
    with fake_mesh(sizes, rank=pp_rank * (sizes.world_size // sizes.pp)) as mesh:
        layout = parallelize(work.builder, mesh, options, precision, work.adapters)
        counts, traces, layers, cache = ParameterCounts(), [], 0, 0
        hidden_size = 0 if layout.plan.pipeline is None else layout.plan.pipeline.hidden_size
        for number, module in zip(layout.numbers, layout.modules, strict=True):
            counts += count_parameters(
                module,
                layout.plan,
                work.sizes,
                sharded=storage.sharded,
                partial=layout.tensor_partial,
                forms=gather_dtypes(module, layout.plan, work.precision),
                keeps=storage.sharded and leaves_experts_whole(work.sizes, work.precision),
                state=work.state,
            )
            for name in product_weights(module, layout.plan) if storage.cast_once else ():
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.to(work.autocast)
            if compiled:
                again = work.options.sequence_parallel and work.options.regathers
                keep_as_compiled(module, layout.plan, regathers=again)
            layers += sum(matches(layout.plan.recompute_layer, name) for name, _ in module.named_modules())
            with name_shape_errors([module], layout.plan, sizes), _noted_cache(module, layout.plan, work) as noted:
                traces.append(_trace(module, replace(work, options=options), mesh, number, hidden_size))
            cache += sum(noted.values())
        teacher = _measure_teacher(replace(work, options=options), mesh, precision)
    return MeasuredRank(
        counts=counts, traces=tuple(traces), layers=layers, hidden_size=hidden_size, teacher=teacher, cache=cache
    )


@contextmanager
def _noted_cache(module: nn.Module, plan: ParallelPlan, work: Workload) -> Iterator[dict[int, int]]:
    """Yield what becomes, while ``module`` runs a micro-batch, the bytes of a cache for the answers to one, by
    attention core; none where the model writes no answers or keeps no keys."""
    rows = work.micro_batch_size * work.objective.traits.answers
    slots = attention_slots([module], plan) if rows else []
    noted: dict[int, int] = {}

    def note(number: int, semantics: AttentionSemantics, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        width = cached_width(semantics, work.seq_length)
        noted[number] = sum(rows * width * part.shape[1] * part.shape[3] * part.element_size() for part in args[1:3])

    handles = [
        parent.get_submodule(name).register_forward_pre_hook(partial(note, number, slot_semantics))
        for number, (parent, name, slot_semantics) in enumerate(slots if isinstance(slots, list) else [])
    ]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _measure_teacher(work: Workload, mesh: ParallelMesh, precision: PrecisionPolicy) -> MeasuredTeacher:
    """Lay out this rank's stages of the second model, and run a micro-batch forward through each."""
    if work.teacher is None:
        return MeasuredTeacher()
    layout = parallelize(work.teacher, mesh, work.options.of_frozen(), precision)
    hidden_size = 0 if layout.plan.pipeline is None else layout.plan.pipeline.hidden_size
    weights = forward = logits_bytes = 0
    for number, module in zip(layout.numbers, layout.modules, strict=True):
        counts = count_parameters(
            module,
            layout.plan,
            work.sizes,
            sharded=work.storage.sharded,
            forms=gather_dtypes(module, layout.plan, work.precision),
            state=work.state,
        )
        views, stage_input = _use_local_tensors(module.eval()), _stage_input(work, work.batch(), number, hidden_size)
        with _refuse_values():
            needed, output = trace_forward(module, stage_input, autocast=work.autocast, views=views)
        weights, forward = weights + counts.frozen_bytes, max(forward, needed + gathered_bytes(counts, work.storage))
        logits_bytes = work.objective.teacher_bytes(output) if number == work.sizes.stages - 1 else 0
    return MeasuredTeacher(weights=weights, running=forward, kept=logits_bytes)


def _stage_input(work: Workload, batch: Batch, number: int, hidden_size: int) -> StageInput:
    """Return what stage ``number`` takes of ``batch``."""
    of_rows = partial(vocabulary_parallel_cross_entropies, kernels=work.options.row_kernels)
    return StageInput(
        first=batch.input_ids if number == 0 else work.hidden(hidden_size),
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        step=StepContext(labels=batch.labels, head_loss=work.objective.head_loss, vocabulary_loss=of_rows),
        sent=work.sent if work.sizes.pp > 1 else None,
    )


def _trace(module: nn.Module, work: Workload, mesh: ParallelMesh, number: int, hidden_size: int) -> MicroBatchTrace:
    batch = work.batch()
    stage_input = _stage_input(work, batch, number, hidden_size)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        assert stage_input.step is not None
        return objective_output(work.objective, logits, batch, stage_input.step).loss_sum

    module.train()
    views = _use_local_tensors(module)
    with _refuse_values():
        return trace_micro_batch(
            module,
            stage_input,
            loss=loss if number == work.sizes.stages - 1 else None,
            holds_output=work.sizes.pp > 1,
            gradients=work.storage.gradient_use,
            masters=getattr(torch, work.precision.gradients) if work.storage.copied else None,
            autocast=work.autocast,
            views=views,
            dimensions=dimensions(mesh),
        )


_IN_KERNELS = RowKernels(
    lambda rows, columns, dtype: rows.new_empty((2, len(rows)), dtype=dtype).unbind(),  # type: ignore[arg-type, return-value]
    lambda rows, columns, log_sums, hits, scale, out: out,
)
"""The passes of compiled losses in what they allocate: nothing in full precision."""


@contextmanager
def _refuse_values() -> Iterator[None]:
    """Raise :class:`ModelReadsValues` where an operator needs values, for which torch names the meta tensor or the
    device."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error).lower():
            raise
        reason = re.split(r"\.\s|\n|, as |;", str(error), maxsplit=1)[0].rstrip(".")
        raise ModelReadsValues(reason=reason) from error


def _use_local_tensors(module: nn.Module) -> list[nn.Parameter]:
    """Replace DTensors by plain local parameters, and return these. Modules compute with local parts; DTensor's
    propagation of shapes, which works on whole tensors, would be counted otherwise."""
    replaced = []
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(local_of(parameter).detach(), requires_grad=parameter.requires_grad)
                setattr(part, name, local)
                replaced.append(local)
    return replaced


def dimensions(mesh: ParallelMesh) -> Mapping[str, str]:
    """Return the mesh dimension by name of its process group; one that is known under two names counts under the
    narrower."""
    dims: tuple[Dimension, ...] = ("dp_replicate", "fsdp", "efsdp", "pp", "ep", "cp", "tp", "token_shuffle")
    groups = {dim: mesh.group(dim) for dim in dims}
    data = ("dp_replicate", "fsdp", "efsdp")
    return {group.group_name: "dp" if dim in data else dim for dim, group in groups.items() if group is not None}


@contextmanager
def fake_mesh(sizes: MeshSizes, *, rank: int = 0) -> Iterator[ParallelMesh]:
    """Provide the mesh of a run of ``sizes`` as its rank ``rank`` sees it, for tensors of the meta device.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process that trains cannot pretend to be another one: it has a process group")
    dist.init_process_group(
        f"{HOST.type}:{_FAKE},meta:{_FAKE}", rank=rank, world_size=sizes.world_size, store=FakeStore()
    )
    # Two device types have no default among them, which shutting down would complain of.
    assert dist.group.WORLD is not None
    dist.group.WORLD._set_default_backend(dist.Backend.backend_type_map[_FAKE])
    try:
        yield ParallelMesh.build(sizes, HOST.type)
    finally:
        dist.destroy_process_group()
