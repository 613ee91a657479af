"""A model in its layout: forward and backward over the micro-batches of one global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from nxdt_core.errors import WeightsDoNotFit
from nxdt_core.nn.aux_loss import aux_loss_scale
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.engine import StepLoss
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["TorchModel"]


class TorchModel:
    """One process's whole model; see :class:`nxdt_core.protocols.engine.ParallelModel`."""

    def __init__(self, module: nn.Module, plan: ParallelPlan, precision: PrecisionPolicy, device: torch.device) -> None:
        self.module = module
        self.plan = plan
        self._precision = precision
        self._device = device
        self._users = {user for _, user in plan.tied}

    def run_train(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Accumulate the gradients of the global batch's loss, one micro-batch on the device at a time."""
        self.module.train()
        return self._run(micro_batches, objective, backward=True)

    def run_eval(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Loss without gradients, in evaluation mode."""
        self.module.eval()
        with torch.no_grad():
            return self._run(micro_batches, objective, backward=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, vocab] of ``input_ids`` [batch, seq], in the run's compute dtype, without gradients."""
        self.module.eval()
        with torch.no_grad(), self._autocast():
            logits: torch.Tensor = self.module(input_ids.to(self._device))
        return logits

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their global names; a tied one under its owner's."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name not in self._users:
                yield name, parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and saved buffers; a tied one once."""
        return {name: value for name, value in self.module.state_dict().items() if name not in self._users}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy ``state`` into the parameters.

        Raises:
            WeightsDoNotFit: names or shapes differ (with ``strict=False``: shapes only).
        """
        own = self.state_dict()
        shapes = [
            f"{name}: {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ]
        missing = [name for name in own if name not in state] if strict else []
        extra = [name for name in state if name not in own] if strict else []
        if shapes or missing or extra:
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
        with torch.no_grad():
            for name, value in state.items():
                if name in own:
                    own[name].copy_(value)

    def local_modules(self) -> Sequence[nn.Module]:
        """The one module."""
        return (self.module,)

    def _run(self, micro_batches: Sequence[Batch], objective: Objective, *, backward: bool) -> StepLoss:
        # The weights come from the host's copy of the batch, so that no kernel is waited for.
        weight = torch.stack([objective.weight(batch) for batch in micro_batches]).sum()
        total = torch.where(weight > 0, weight, torch.ones_like(weight)).to(self._device)
        losses: list[torch.Tensor] = []
        metrics: dict[str, list[torch.Tensor]] = {}
        for host_batch in micro_batches:
            batch = host_batch.to(self._device)
            with self._autocast(), aux_loss_scale(1 / total):
                logits = self.module(batch.input_ids, batch.position_ids, batch.document_ids)
                output = objective(logits, batch)
            loss = output.loss_sum / total
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            for name, value in output.metrics.items():
                metrics.setdefault(name, []).append(value.detach() / total)
        return StepLoss(
            loss=torch.stack(losses).sum(),
            weight=weight,
            metrics={name: torch.stack(values).sum() for name, values in metrics.items()},
        )

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._precision.autocast
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, dtype))
