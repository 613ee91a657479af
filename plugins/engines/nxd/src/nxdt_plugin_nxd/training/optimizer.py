"""A torch optimizer over this rank's parameters, whose state has their global names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.state import DeviceRejection, packed_state, unpacked_state
from nxdt_core.errors.optimizers import OptimizerNeedsWholeParameters
from nxdt_core.errors.training import OptimizerStateDoesNotFit
from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_core.protocols.parallel_model import ParallelOptimizer
from nxdt_core.protocols.piece import Piece
from nxdt_plugin_nxd.neuron.lazy_device import end_of_step
from nxdt_plugin_nxd.training.model import NxdModel, elements

_OF_THE_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Torch's optimizers whose updates are not made element by element."""
_BY_ELEMENT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)

Build = Callable[[list[ParameterGroup]], torch.optim.Optimizer]


class NxdOptimizer(ParallelOptimizer):
    """See :class:`nxdt_core.protocols.parallel_model.ParallelOptimizer`."""

    def __init__(self, model: NxdModel, build: Build, groups: Sequence[ParameterGroup], *, lr: float) -> None:
        """``lr`` is the peak that a rank without anything to train reports.

        Raises:
            OptimizerNeedsWholeParameters: the optimizer takes parts for wholes, or copies for parts.
        """
        self._model = model
        self._trained = {name: model.trained[name] for group in groups for name in group["names"]}
        over = model.tensor_group, model.expert_group
        placed: list[ParameterGroup] = []
        for group in groups:
            trained = [self._trained[name] for name in group["names"]]
            shards = [each.placed(*over) for each in trained]
            placed.append({**group, "params": [each.tensor for each in trained], "shards": shards})
        self.inner = build(placed) if placed else torch.optim.SGD([{"params": []}], lr)
        # Some optimizers take parts for wholes, and others copies for parts.
        cut = [name for name, each in self._trained.items() if each.parts > 1 or each.held.shard is not None]
        copied = [name for name in cut if (shard := self._trained[name].held.shard) is not None and shard.copies > 1]
        refused = cut if isinstance(self.inner, _OF_THE_WHOLE) else copied
        if refused and not isinstance(self.inner, _BY_ELEMENT):
            raise OptimizerNeedsWholeParameters(optimizer=type(self.inner).__name__, parameters=refused)
        self._peaks = [float(group["lr"]) for group in self.inner.param_groups]
        tensors = {name: each.tensor for name, each in self._trained.items()}
        waits = not profile_of(model.device).never_waits
        self._rejection = None if waits else DeviceRejection(tensors, tensors, self.inner)
        self._rejected: torch.Tensor | None = None
        self.skipped_steps: torch.Tensor | int = 0
        """Steps that were not applied since their loss or gradient was not finite."""

    def begin_step(self, step: int) -> None:
        """Set the number of the coming update."""
        self._model.begin_step(step)

    def set_lr_factor(self, factor: float) -> None:
        """Set each group's learning rate to its peak times ``factor``."""
        for group, peak in zip(self.inner.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Return the 2-norm of all gradients before clipping. Collective."""
        return self._model.finish_gradients(max_norm)

    def reject_unless_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Let the coming :meth:`step` leave the weights as they are unless both scalars are finite, and count that."""
        self._rejected = ~torch.isfinite(loss + grad_norm)
        self.skipped_steps = self.skipped_steps + self._rejected.to(torch.int64)

    def step(self) -> None:
        """Update, then clear the gradients."""
        rejected, self._rejected = self._rejected, None
        if rejected is not None and self._rejection is not None:
            with self._rejection.undoing(rejected):
                self.inner.step()
            self._model.weights_changed()
        elif rejected is None or not bool(rejected):
            self.inner.step()
            self._model.weights_changed()
        self._model.clear_gradients()
        end_of_step(self._model.device)

    def state_dict(self) -> dict[str, torch.Tensor | Piece]:
        """Return ``<parameter name>/<state name>`` → tensor, sharded as the parameter where it has its shape."""
        if self._rejection is not None:
            self._rejection.settle()
        state: dict[str, torch.Tensor | Piece] = {}
        for name, trained in self._trained.items():
            for leaf, value in unpacked_state(self.inner, trained.tensor).items():
                if isinstance(value, torch.Tensor):
                    local = value.shape == trained.tensor.shape
                    state[f"{name}/{leaf}"] = trained.piece(value) if local else value
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor | Piece]) -> None:
        """Put ``state`` back under this optimizer's parameters.

        Raises:
            OptimizerStateDoesNotFit: state of a parameter that is not here.
        """
        unknown = sorted({key.rpartition("/")[0] for key in state} - self._trained.keys())
        if unknown:
            raise OptimizerStateDoesNotFit(parameters=unknown)
        if self._rejection is not None:
            self._rejection.forget()
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            name, _, leaf = key.rpartition("/")
            loaded, tensor = elements(value), self._trained[name].tensor
            # Counters of steps stay on the host: on a lazy device each would be read back at every step.
            device = loaded.device if loaded.ndim == 0 else tensor.device
            by_name.setdefault(name, {})[leaf] = loaded.to(device, copy=True)
        for name, leaves in by_name.items():
            tensor = self._trained[name].tensor
            self.inner.state[tensor].update(packed_state(self.inner, tensor, leaves))
