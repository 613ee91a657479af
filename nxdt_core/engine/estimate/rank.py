"""One pipeline rank on the meta device: its stages in their layout, and a micro-batch through each.

:class:`Workload` is what that depends on: a model, its training and its layout, read from a configuration. The rank's
process group is stock torch's ``fake`` backend, of any size in one process; its collectives do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nxdt_core.config import ResolvedConfig
from nxdt_core.config.schema import RunConfig
from nxdt_core.distributed.devices import HOST, PROFILES, available_type, profile_of, register_profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data.fsdp import WeightStorage, gather_dtypes, product_weights
from nxdt_core.engine.decoding import attention_slots
from nxdt_core.engine.estimate.memory import (
    HeldParameter,
    StateOf,
    gathered_bytes,
    held_parameters,
    needs_stand_ins,
    optimizer_state,
)
from nxdt_core.engine.estimate.trace import (
    AcceleratorKernels,
    LiveBytes,
    MicroBatchTrace,
    keep_as_compiled,
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
from nxdt_core.models.patterns import modules_at
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.estimate import Memory, RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext

_FAKE = "fake"
_IN_KERNELS = RowKernels(
    lambda rows, columns, dtype: rows.new_empty((2, len(rows)), dtype=dtype).unbind(),  # type: ignore[arg-type, return-value]
    lambda rows, columns, log_sums, hits, scale, out: out,
)
"""The passes of compiled losses in what they allocate: nothing in full precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run, as far as its sizes depend on it."""

    run: RunConfig
    parts: RunParts
    state: StateOf
    """Measures the optimizer state of a parameter."""
    stand_ins: bool = False
    """The optimizer works on float32 stand-ins of weights that are rounded."""
    sizes: MeshSizes
    options: LayoutOptions
    records: bool = False
    """The device records passes of generation, whose cache is then kept during a step."""
    packed: bool = False
    """Samples hold several documents that do not see each other: attention then receives their ids."""

    @property
    def storage(self) -> WeightStorage:
        """Return how the ranks hold parameters, gradients and optimizer state."""
        data = self.run.data
        micro_batches = data.global_batch_size // (data.micro_batch_size * self.sizes.dp)
        return WeightStorage.of(self.sizes, self.parts.precision, micro_batches=micro_batches)

    @property
    def rows_per_sample(self) -> int:
        """Return the number of sequences of a sample."""
        traits = self.parts.objective.traits
        return traits.loss_rows or traits.rows_per_sample

    def batch(self) -> Batch:
        """Return one micro-batch as a rank sees it, on the meta device."""

        def tokens() -> torch.Tensor:
            shape = self.run.data.micro_batch_size * self.rows_per_sample, self.run.data.seq_length // self.sizes.cp
            return torch.empty(shape, dtype=torch.int64, device="meta")

        traits = self.parts.objective.traits
        placed = self.sizes.cp > 1 or self.sizes.pp > 1 or self.packed
        return Batch(
            input_ids=tokens(),
            labels=tokens(),
            position_ids=tokens() if placed else None,
            document_ids=tokens() if self.packed else None,
            reference_log_probs=tokens().float() if traits.reference else None,
            values={name: tokens().float() for name in traits.values},
            rows_per_sample=self.rows_per_sample,
        )

    def hidden(self, size: int) -> torch.Tensor:
        """Hidden states of a micro-batch within pipeline stages, of width ``size``."""
        rows, sequence = self.batch().input_ids.shape
        if self.options.sequence_parallel:
            sequence //= self.sizes.tp
        return torch.empty(rows, sequence, size, dtype=getattr(torch, self.parts.precision.parameters), device="meta")

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matrix products under autocast; None without it."""
        autocast = self.parts.precision.autocast
        return None if autocast is None else getattr(torch, autocast)

    @property
    def sent(self) -> torch.dtype | None:
        """Return the dtype in which hidden states travel between pipeline stages; None where nothing travels."""
        return None if self.sizes.pp == 1 else self.autocast or getattr(torch, self.parts.precision.parameters)


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
    sizes = run.mesh_sizes()
    return Workload(
        run=run,
        parts=parts,
        state=optimizer_state(factory, optimizer.config, dtype, two_byte=two_byte, more=parts.extra_state_bytes),
        stand_ins=rounding is not None and needs_stand_ins(factory, optimizer.config),
        sizes=sizes,
        options=LayoutOptions.of(run, profile, sizes),
        records=profile.records,
        packed=config.tree.get("data.reset_attention_mask") is True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """Measurements of one rank, in bytes where nothing else is said."""

    held: tuple[HeldParameter, ...]
    """Parameters of all its stages."""
    traces: tuple[MicroBatchTrace, ...]
    """One per stage, ascending."""
    layers: int
    """Number of layers."""
    received: int
    """Hidden states of a micro-batch on their way from another stage; 0 where nothing travels."""
    teacher: Memory
    """What a second model needs, which runs forward only: weights are its shard, logits what is kept of those of a
    micro-batch, and workspace what it needs beyond that while it runs, gathered weights and hidden states."""
    cache: int = 0
    """Keys and values of a micro-batch's answers; 0 where the model writes none."""


def measure_rank(work: Workload, pp_rank: int) -> MeasuredRank:
    """Lay out the stages of ``pp_rank`` and run a micro-batch through each.

    FSDP2 and compilation are left out: the first cannot run without memory and is counted by rules, and what compiled
    layers keep is made of layers as they are written (:func:`keep_as_compiled`).
    """
    compiled, storage = work.options.compile_backend is not None, work.storage
    options = replace(
        work.options, compile_backend=None, row_kernels=_IN_KERNELS if compiled else work.options.row_kernels
    )
    policy = work.parts.precision
    precision = replace(policy, master_weights=False, gradients=policy.parameters)
    sizes = replace(work.sizes, zero_stage=0)
    with fake_mesh(sizes, rank=pp_rank * (sizes.world_size // sizes.pp)) as mesh:
        layout = parallelize(work.parts.builder, mesh, options, precision, work.parts.adapters)
        plan, held, traces, layers, cache = layout.plan, list[HeldParameter](), [], 0, 0
        hidden = work.hidden(0 if plan.pipeline is None else plan.pipeline.hidden_size)
        for number, module in zip(layout.numbers, layout.modules, strict=True):
            partial, forms = layout.tensor_partial, gather_dtypes(module, plan, policy)
            held += held_parameters(module, plan, storage, stage=number, partial=partial, forms=forms, state=work.state)
            for name in product_weights(module, plan) if storage.cast_once else ():
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.to(work.autocast)
            if compiled:
                again = work.options.sequence_parallel and work.options.regathers
                keep_as_compiled(module, plan, regathers=again)
            layers += len(modules_at(module, (plan.recompute_layer,)))
            with name_shape_errors([module], plan, sizes), _noted_cache(module, plan, work) as noted:
                traces.append(_trace(module, replace(work, options=options), mesh, number, hidden))
            cache += sum(noted.values())
        teacher = _measure_teacher(replace(work, options=options), mesh, precision)
    return MeasuredRank(
        held=tuple(held),
        traces=tuple(traces),
        layers=layers,
        received=0 if work.sent is None else hidden.to(work.sent).nbytes,
        teacher=teacher,
        cache=cache,
    )


@contextmanager
def _noted_cache(module: nn.Module, plan: ParallelPlan, work: Workload) -> Iterator[dict[int, int]]:
    """Yield what becomes, while ``module`` runs a micro-batch, the bytes of a cache for the answers to one, by
    attention core; none where the model writes no answers or keeps no keys."""
    rows = work.run.data.micro_batch_size * work.parts.objective.traits.answers
    slots = attention_slots([module], plan) if rows else []
    noted: dict[int, int] = {}

    def note(number: int, semantics: AttentionSemantics, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        width = cached_width(semantics, work.run.data.seq_length)
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


def _measure_teacher(work: Workload, mesh: ParallelMesh, precision: PrecisionPolicy) -> Memory:
    """Lay out this rank's stages of the second model, and run a micro-batch forward through each."""
    if work.parts.teacher is None:
        return Memory()
    layout = parallelize(work.parts.teacher, mesh, work.options.of_frozen(), precision)
    hidden = work.hidden(0 if layout.plan.pipeline is None else layout.plan.pipeline.hidden_size)
    weights = forward = logits_bytes = 0
    for number, module in zip(layout.numbers, layout.modules, strict=True):
        forms = gather_dtypes(module, layout.plan, work.parts.precision)
        held = held_parameters(module, layout.plan, work.storage, forms=forms, state=work.state)
        views, batch = _use_local_tensors(module.eval()), work.batch()
        first, arguments = hidden if number else batch.input_ids, _arguments(work, batch)
        live = LiveBytes([first, *arguments.values(), *module.parameters(), *module.buffers()])
        with _refuse_values(), torch.no_grad(), AcceleratorKernels(work.autocast, views), live:
            output = module(first, **arguments)
        weights += sum(p.size_bytes for p in held if not p.trained)
        forward = max(forward, sum(live.peak.values()) + gathered_bytes(held, work.storage))
        logits_bytes = work.parts.objective.teacher_bytes(output) if number == work.sizes.stages - 1 else 0
    return Memory(weights=weights, workspace=forward, logits=logits_bytes)


def _arguments(work: Workload, batch: Batch) -> dict[str, Any]:
    """Return what a stage takes of ``batch`` in addition to its first argument."""
    of_rows = partial(vocabulary_parallel_cross_entropies, kernels=work.options.row_kernels)
    head_loss = work.parts.objective.head_loss
    step = StepContext(labels=batch.labels, head_loss=head_loss, vocabulary_loss=of_rows)
    return {**batch.arguments(), "step": step}


def _trace(module: nn.Module, work: Workload, mesh: ParallelMesh, number: int, hidden: torch.Tensor) -> MicroBatchTrace:
    batch, storage = work.batch(), work.storage
    arguments = _arguments(work, batch)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return objective_output(work.parts.objective, logits, batch, arguments["step"]).loss_sum

    module.train()
    views = _use_local_tensors(module)
    with _refuse_values():
        return trace_micro_batch(
            module,
            hidden if number else batch.input_ids,
            arguments,
            sent=work.sent,
            loss=loss if number == work.sizes.stages - 1 else None,
            holds_output=work.sizes.pp > 1,
            gradients=storage.gradient_use,
            masters=getattr(torch, storage.policy.gradients) if storage.copied else None,
            autocast=work.autocast,
            views=views,
            dimensions=dimensions(mesh),
        )


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
