"""One stage under the stock schedules, and the micro-batches that the stages of a rank read.

Shares of experts' assignments that a loss pools over the layers of all stages: forward sends the sum over the layers so
far with the hidden states. The last stage has it of all layers, and its gradient, which goes back from stage to stage,
is that sum: each stage knows it before the backward of its layers.

Memory: up to 2.14, stock allocates two buffers of hidden states for every micro-batch of a step and keeps them
permanently, and its looped schedules keep all tensors that they sent until the end of the step. Here, a received tensor
lives until its backward, and a sent one until its send has ended. There are a few of them at a time, independent of the
number of micro-batches per step.

FSDP2: stock accumulates unsharded gradients and reduces them once, after the last micro-batch. That is ZeRO-1; for
ZeRO-2 and ZeRO-3, gradients are reduced here after each backward.

What an older torch needs says up to which version.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stock

from nxdt_core.distributed.torch_versions import fsdp_parameter_groups
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import ALL_LAYERS, StepContext

StepContexts = Callable[[Batch], StepContext]
"""Returns what the passes of a micro-batch on the device depend on in addition."""

_REDUCES_LAST = hasattr(PipelineStage, "perform_reduce_grad")
"""True where schedules call ``perform_reduce_grad`` at the end of a step. Those of torch 2.9 do not."""
_ALLOCATES = hasattr(stock._RecvInfo, "take_buffer")
"""True from torch 2.15 on: a stage makes a buffer when it receives, of the shape in the receive's description. It drops
the buffer when it computes."""
_SENDS_IN_FLIGHT = 4
"""Sends of a stage in flight; it waits before another. Peers receive in the order of sending: the oldest ends first."""


@final
class MicroBatchStream:
    """What the stages of a rank share: the micro-batches of a step, and the form in which these pass from stage to
    stage.

    Micro-batches are moved to the device when a stage first asks for them, and released when the rank's last stage has
    run their forward.
    """

    def __init__(
        self,
        device: torch.device,
        hidden_shape: Callable[[Batch], tuple[int, ...]],
        hidden_dtype: torch.dtype,
        sent: torch.dtype,
        *,
        forward_context: Callable[[], AbstractContextManager[Any]],
        pooled: int,
    ) -> None:
        """See :class:`nxdt_core.engine.pipeline.runner.PipelineRunner`."""
        self.on_device: dict[int, tuple[Batch, StepContext]] = {}
        self.device, self.forward_context, self.pooled = device, forward_context, pooled
        self.hidden_dtype, self.sent = hidden_dtype, sent
        self._hidden_shape = hidden_shape
        self._host: Sequence[Batch] = ()
        self._context_of: StepContexts = lambda batch: StepContext()

    @contextmanager
    def of(self, batches: Sequence[Batch], contexts: StepContexts) -> Iterator[None]:
        """Serve ``batches`` within the block."""
        self._host, self._context_of = batches, contexts
        try:
            yield
        finally:
            self._host = ()
            self.on_device.clear()

    def __getitem__(self, index: int) -> tuple[Batch, StepContext]:
        """Micro-batch ``index`` on the device, and its context, the same for all stages and the loss."""
        if index not in self.on_device:
            batch = self._host[index].to(self.device)
            self.on_device[index] = batch, self._context_of(batch)
        return self.on_device[index]

    def arguments(self, index: int) -> dict[str, Any]:
        """Return what a stage's forward takes besides ids or hidden states: stages behind the first see no ids to
        count."""
        batch, _ = self[index]
        arguments = batch.arguments()
        if "position_ids" in arguments and arguments["position_ids"] is None:
            positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
            arguments["position_ids"] = positions.expand_as(batch.input_ids)
        return arguments

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the hidden states between stages for micro-batch ``index``, on this rank."""
        return self._hidden_shape(self._host[index])

    def buffer(self, index: int) -> torch.Tensor:
        """Return the memory into which those hidden states are received."""
        return torch.empty(self.shape(index), dtype=self.sent, device=self.device)

    def no_shares(self, device: torch.device | str) -> torch.Tensor:
        """Return zeros for the experts' shares that travel with the hidden states, in the dtype of routers."""
        dtype = torch.promote_types(self.hidden_dtype, torch.float32)
        return torch.zeros(self.pooled, dtype=dtype, device=device, requires_grad=True)


class _SentOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: torch.Tensor, own: torch.Tensor, shares: dict[int, torch.Tensor]) -> torch.Tensor:
        ctx.shares = shares
        return carried + own

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.shares[ALL_LAYERS] = grad
        return grad, None, None


class _SentBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, carried: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.total, None


@final
class StreamedStage(PipelineStage):
    """A stage whose shapes are given, and that takes its inputs from a :class:`MicroBatchStream`."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        stream: MicroBatchStream,
        group: dist.ProcessGroup,
        *,
        zero_stage: int,
        releases: bool,
        keeps_sends: bool,
    ) -> None:
        """``stages``: of the whole pipeline, over ``group``. ``releases``: whether this is the rank's last stage to run
        a micro-batch forward, and not the pipeline's. ``keeps_sends``: whether the schedule keeps what it sends to the
        end of the step, so that stages send themselves."""
        hidden = torch.empty(stream.shape(0), dtype=stream.sent, device="meta", requires_grad=True)
        shares = [stream.no_shares("meta")] if stream.pooled else []
        # Shapes are given, so that no stage infers them by running; the ends' are never used.
        ids = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
        super().__init__(
            module,
            index,
            stages,
            stream.device,
            input_args=ids if index == 0 else (hidden, *shares),
            output_args=(hidden, *shares),
            group=group,
        )
        self._stream, self._zero_stage = stream, zero_stage
        self._releases, self._keeps_sends = releases, keeps_sends
        self._running = 0
        """Micro-batch whose forward runs."""
        self._sends: deque[dist.Work] = deque()
        self._reduces_each = isinstance(module, FSDPModule) and zero_stage >= 2

    # Inputs

    def forward_one_chunk(self, fwd_chunk_id: int, *inputs: Any, **options: Any) -> Any:
        """Forward of one micro-batch, whose inputs come from the stream instead of ``inputs``."""
        stream = self._stream
        args = (stream[fwd_chunk_id][0].input_ids,) if self.is_first else ()
        self._running = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, args, stream.arguments(fwd_chunk_id), **options)
        if not _REDUCES_LAST and self.output_chunks:  # 2.9 keeps the logits of all micro-batches and concatenates them
            self.output_chunks[-1] = torch.empty(1)
        if self._reduces_each and _ALLOCATES:  # 2.15 sets it in forward, to reduce once a step
            cast(Any, self.submod).set_manual_backward_finalization(False)
        if self._releases:
            stream.on_device.pop(fwd_chunk_id, None)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's forward, in the context that the run wants around it (autocast); hidden states from and
        for other stages are in the dtype in which they travel."""
        stream, index = self._stream, self._running
        shape, dtype = stream.shape(index), stream.hidden_dtype
        carried: torch.Tensor | None = args[1] if len(args) > 1 else None
        if not self.is_first:
            args = (args[0].to(dtype),)
        shares = stream[index][1].pooled_shares
        before = {*shares}
        with stream.forward_context():
            # Given here, and not with the other arguments: stock looks for tensors among those.
            kwargs["step"] = stream[index][1]
            output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        added = [value for key, value in shares.items() if key not in before]
        if self.is_last:
            if carried is None:
                return output
            # Each stage knows the sum before the backward of its layers: it goes back as the gradient of what came.
            shares[ALL_LAYERS] = sum(added, carried.detach())
            return _SentBack.apply(output, carried, shares[ALL_LAYERS])  # type: ignore[no-untyped-call]
        if output.shape != torch.Size(shape) or output.dtype != dtype:
            form = f"{tuple(output.shape)} {output.dtype}"
            raise TypeError(f"stage {self.stage_index} gave {form}, the next one expects {tuple(shape)} {dtype}")
        output = output.to(stream.sent)
        if not stream.pooled:
            return output
        if carried is None:
            carried = stream.no_shares(self.device)
        own = sum(added, torch.zeros_like(carried))
        return output, _SentOn.apply(carried, own, shares)  # type: ignore[no-untyped-call]

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Check nothing: up to 2.11 stock compares token ids with the shape of this rank's hidden states."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Check nothing: up to 2.11 stock compares logits with the shape that is given for hidden states."""

    # Buffers

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first sends and receives between neighbours, of one number each, which 2.12 replaced by a vote.

        Stages of one rank are neighbours as well under ``zbv``, and a rank cannot send to itself. 2.9 sends an int64
        where it receives a float32.
        """
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        between = [op for op in ops if op.group_peer != self.group_rank]
        for op in between:
            op.tensor = op.tensor.float()
        return between

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(1, *args, **kwargs)
        template = self.args_recv_info[0]
        _release(template)
        self.args_recv_info = {chunk: tuple(map(copy.copy, template)) for chunk in range(num_microbatches)}
        return prepared

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> Any:
        infos = super()._create_grad_recv_info(act_send_info)
        _release(infos)
        return infos

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of a micro-batch's hidden states, into a buffer made now, which requires gradients (up to
        2.11 stock sets that at the start)."""
        if not self.is_first:
            self._shape(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        ops: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        for op in ops:
            op.tensor.requires_grad_(self.has_backward)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of the gradient of a micro-batch's output, into a buffer made now."""
        if self.has_backward and not self.is_last:
            self._shape(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _shape(self, infos: tuple[Any, ...], chunk: int) -> None:
        """Say the shape of hidden states to stock, or make their buffer."""
        if _ALLOCATES:
            shape = self._stream.shape(chunk)
            stride = torch.empty(shape, device="meta").stride()
            meta = infos[0].tensor_meta
            infos[0].tensor_meta = replace(meta, shape=torch.Size(shape), stride=stride, dtype=self._stream.sent)
            return
        infos[0].buffer = self._stream.buffer(chunk)
        for info in infos[1:]:
            info.buffer = self._stream.no_shares(self.device).detach()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of a micro-batch's output; none where it is under way already."""
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of the gradient of a micro-batch's input; none where it is under way already."""
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._keeps_sends:
            return ops
        for op in ops:
            work = dist.isend(op.tensor, group=op.group, group_dst=op.group_peer)
            assert work is not None
            self._sends.append(work)
        self.finish_sends(_SENDS_IN_FLIGHT)
        return []

    def finish_sends(self, but: int = 0) -> None:
        """Wait for all sends ``but`` the last ones."""
        while len(self._sends) > but:
            self._sends.popleft().wait()

    # Backward

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch; ``full_backward=False`` leaves the gradients of parameters for later."""
        if not full_backward:
            self._unshard()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if last_backward and full_backward and not _REDUCES_LAST:
            self.perform_reduce_grad(1)
        if loss is not None and full_backward:
            loss.detach_()  # stock keeps losses to the end of the step, and with one its graph and hidden states
        _release(self.args_recv_info[bwd_chunk_id])
        _release(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of parameters for a micro-batch whose inputs' gradients are done.

        Stock adds them to ``.grad`` itself, past the hooks of FSDP2, so what those do is done here.
        """
        self._unshard()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self._reduces_each:
            self._reduce_from_now(last_backward)
        if isinstance(self.submod, FSDPModule):
            # What FSDP2 runs after backward, with its current settings: it reduces, or moves gradients of low precision
            # to their accumulators. It has no public call for that; torch's perform_reduce_grad does the same.
            root: Any = self.submod._get_fsdp_state()
            for state in root._state_ctx.all_states:
                for group in fsdp_parameter_groups(state):
                    # Up to 2.14, the first part of the backward may have moved some gradients to accumulators.
                    older = [p for p in group.fsdp_params if hasattr(p, "to_accumulated_grad_if_needed")]
                    if any(p.unsharded_accumulated_grad is not None for p in older):
                        for p in older:
                            p.accumulate_unsharded_grad_if_needed()
                            p.to_accumulated_grad_if_needed()
                    group.post_backward()
            if getattr(root._state_ctx, "manual_backward_finalization_active", False) is None:
                # 2.15 sets it in backward
                root._state_ctx.manual_backward_finalization_active = root._state_ctx.manual_backward_finalization
            root._root_post_backward_final_callback()

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run backward as torch's stage does, except whole passes under ZeRO-2 and -3, where FSDP2 reduces within the
        pass."""
        if backward_type == "input":  # up to 2.11, it takes nothing but tensors
            tensors = [value for value in bwd_kwargs["input_values"] if isinstance(value, torch.Tensor)]
            bwd_kwargs = {**bwd_kwargs, "input_values": tensors}
        if not self._reduces_each or backward_type != "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self._reduce_from_now(last_backward)
        output, grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        outputs = (output,) if isinstance(output, torch.Tensor) else tuple(output)
        # Outputs of frozen layers alone have no graph. Of an output that was sent and released, torch 2.15 has its edge
        # in the graph, or None without one.
        roots = [
            (root, grad)
            for root, grad in zip(outputs, grads or (None,) * len(outputs), strict=True)
            if isinstance(root, GradientEdge) or (root is not None and root.requires_grad)
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        taken: list[torch.Tensor | None] = []
        for value in bwd_kwargs["input_values"]:
            taken.append(value.grad if isinstance(value, torch.Tensor) else None)
            if taken[-1] is not None:
                value.grad = None
        return tuple(taken), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the remaining gradients and free gathered parameters: the optimizer will change their shards. Torch
        2.9 does so in the last backward, and has no such call."""
        if self._reduces_each:
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        elif _REDUCES_LAST:
            super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Reduce as :meth:`perform_reduce_grad` does: from 2.15, some schedules start it and wait later."""
        if self._reduces_each:
            self.perform_reduce_grad(1)
        else:
            super().start_gradient_reduction()  # type: ignore[misc]

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait for what :meth:`start_gradient_reduction` has begun."""
        if not self._reduces_each:
            super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]

    def _reduce_from_now(self, last_backward: bool) -> None:
        """Let FSDP2 reduce-scatter after backward; replicas (HSDP) sum up once a step."""
        module = cast(FSDPModule, self.submod)
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(self._zero_stage == 3)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(last_backward)

    def _unshard(self) -> None:
        """Gather the parameters before a split backward, which would miss those that ZeRO-3 has freed and leave out
        their gradients silently. Backward of the embedding reads no weights: the first stage's is always one pass,
        which needs no values."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                groups = fsdp_parameter_groups(module._get_fsdp_state())
                if any(group.unshard_in_backward for group in groups):
                    module.unshard()


def _release(infos: tuple[Any, ...]) -> None:
    for info in () if _ALLOCATES else infos:
        info.buffer = torch.empty(0)  # not None: up to 2.11 stock sets its gradient to None after each step
