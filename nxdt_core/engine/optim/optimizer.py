"""An optimizer over local shards whose state has global names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from nxdt_core.distributed.collectives import group_by_dtype
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.placement import is_dtensor, local_of, placed_like, sharded_over
from nxdt_core.engine.optim.state import DeviceRejection, packed_state, unpacked_state
from nxdt_core.engine.optim.updates import AdamUpdates, Backend, StochasticRounding, StochasticUpdates, stand_ins
from nxdt_core.engine.parameters import shard_of
from nxdt_core.engine.tensor.layers import PaddedDim, unpadded_shard
from nxdt_core.errors.training import (
    OptimizerNeedsWholeParameters,
    OptimizerStateDoesNotFit,
    OptimizerStateNotTensor,
    OptimizerStateOfShards,
)
from nxdt_core.protocols.optimizer import PackedState, ParameterGroup, ParameterShard
from nxdt_core.protocols.parallel_model import ParallelOptimizer
from nxdt_core.protocols.tensor_shards import LocalShard

_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}
"""Python numbers that an optimizer may keep as state, and the dtype that holds them exactly."""

_OF_THE_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Torch's optimizers whose updates are not made element by element."""


class TorchOptimizer(ParallelOptimizer):
    """A stock optimizer over this rank's shards; see :class:`nxdt_core.protocols.parallel_model.ParallelOptimizer`.

    The stock optimizer sees plain tensors that share the shards' memory: its fused and foreach kernels then run once
    over all of them, independent of the meshes that shard them.

    Args:
        build: returns the optimizer over groups of shards.
        groups: of this rank's parameters, by learning rate and weight decay.
        norm: completes the sums of the gradients over ranks, and returns their global 2-norm, a device scalar.
        after_step: called once the weights have changed.
        padded: parameters with heads of zeros, which no checkpoint contains, by name.
        tables: names of embeddings and output heads, which are matrices of no hidden layer.
        rounding: round updates stochastically into bfloat16 weights; the optimizer then sees float32. None: do not.
        backend: runs the kernels of ``rounding``; ``compile`` also those of torch's Adam and AdamW where they are to be
            fused.
        before_step: called with the number of each step in the run, before its forward.
        lr: peak learning rate that a rank reports whose stage is frozen.
        never_waits: undo a step that is not finite on the device, so that the host never waits for that.

    Raises:
        OptimizerNeedsWholeParameters: it is one of torch's that would take shards for whole parameters.
    """

    def __init__(
        self,
        build: Callable[[list[ParameterGroup]], torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        norm: Callable[[], torch.Tensor],
        *,
        after_step: Callable[[], None] | None = None,
        padded: Mapping[str, PaddedDim] | None = None,
        tables: Collection[str] = (),
        rounding: StochasticRounding | None = None,
        backend: Backend = "eager",
        before_step: Callable[[int], None] | None = None,
        lr: float = 0.0,
        never_waits: bool = False,
    ) -> None:
        self._padded = padded or {}
        self._named: dict[str, nn.Parameter] = {}
        self._shards: dict[str, nn.Parameter] = {}
        self._places: dict[str, ParameterShard] = {}
        for group in groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                self._named[name] = self._shards[name] = parameter
                if is_dtensor(parameter):
                    self._shards[name] = nn.Parameter(local_of(parameter).detach(), requires_grad=True)
                self._places[name] = shard_of(parameter, self._padded.get(name), matrix=name not in tables)
        self._trained = self._shards if rounding is None else stand_ins(self._shards)
        of_shards: list[ParameterGroup] = []
        for group in groups:
            params = list(map(self._trained.__getitem__, group["names"]))
            of_shards.append({**group, "params": params, "shards": list(map(self._places.__getitem__, group["names"]))})
        # The factory would refuse an empty list, which a rank has whose stage is frozen.
        self.inner = build(of_shards) if groups else torch.optim.SGD([{"params": []}], lr=lr)
        if isinstance(self.inner, _OF_THE_WHOLE):
            cut = [name for name, parameter in self._named.items() if sharded_over(parameter)]
            if cut:
                raise OptimizerNeedsWholeParameters(optimizer=type(self.inner).__name__, parameters=cut)
        self._fused = getattr(self.inner, "_step_supports_amp_scaling", False)
        self._updates: AdamUpdates | StochasticUpdates | None = None
        """Kernels of the update; None: the optimizer's own."""
        updated = (self.inner, self._shards, self._places, self._trained)
        if (rounding is not None or (backend == "compile" and self._fused)) and AdamUpdates.handles(self.inner):
            self._updates = AdamUpdates(*updated, rounding, backend=backend)
        elif rounding is not None:
            self._updates = StochasticUpdates(*updated, rounding, backend=backend)
        self._rejection = DeviceRejection(self._shards, self._trained, self.inner) if never_waits else None
        self._peak_lr = [float(group["lr"]) for group in self.inner.param_groups]
        self._norm = norm
        self._before_step = before_step
        self._after_step = after_step
        self._step = 0
        self._rejected: torch.Tensor | None = None
        self._untried: list[str] = []
        """Loaded state of another shape than its parameter's, until a step has taken it."""
        self.skipped_steps: torch.Tensor | int = 0
        """Steps that were not applied since their loss or gradient was not finite; a device scalar after the first."""

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Return the 2-norm over all gradients, before clipping; a device scalar.

        Gradients are scaled as ``torch.nn.utils.clip_grad_norm_`` does: here, or in :meth:`step` where fused kernels
        divide the elements that they read. That saves a pass over the gradients.
        """
        norm = self._norm()
        if self._fused and norm.dtype == torch.float32:  # which those kernels expect of the divisor
            divisor = None if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0)
            self.inner.grad_scale = divisor  # type: ignore[attr-defined]
        elif max_norm is not None:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = [local_of(parameter.grad) for parameter in self._named.values() if parameter.grad is not None]
            for same in group_by_dtype(grads):
                torch._foreach_mul_(same, scale.to(same[0].dtype))
        return norm

    def reject_unless_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Let the coming :meth:`step` leave the weights as they are unless both scalars are finite, and count that.

        They are equal on all ranks, so all of them decide in the same way.
        """
        self._rejected = ~torch.isfinite(loss + grad_norm)
        self.skipped_steps = self.skipped_steps + self._rejected.to(torch.int64)

    def step(self) -> None:
        """Update, then drop the gradients.

        Raises:
            OptimizerStateOfShards: loaded state has another shape than the optimizer expects of these shards.
        """
        for name, shard in self._shards.items():  # FSDP2 may have moved a shard that it had to pad
            parameter = self._named[name]
            if shard is not parameter:
                shard.data = local_of(parameter)
                shard.grad = None if parameter.grad is None else local_of(parameter.grad)
        rejected, self._rejected = self._rejected, None
        applies = True
        undoing: AbstractContextManager[None] = nullcontext()
        if rejected is not None and self._fused and not profile_of(rejected.device).host:
            # By the attribute of torch's gradient scaler: a fused kernel decides, and no host waits.
            self.inner.found_inf = rejected.float()  # type: ignore[attr-defined]
        elif rejected is not None and self._rejection is not None:
            undoing = self._rejection.undoing(rejected)
        elif rejected is not None:
            applies = not bool(rejected)
        if applies:
            with undoing:
                try:
                    if self._updates is None:
                        self.inner.step()
                    else:
                        self._updates.apply(self._step)
                except RuntimeError as error:
                    if not self._untried:
                        raise
                    raise OptimizerStateOfShards(state=self._untried, problem="does not fit this layout") from error
            self._untried = []
        if self._after_step is not None:
            self._after_step()
        for parameter in (*self._shards.values(), *self._named.values()):
            parameter.grad = None
        for handed in ("grad_scale", "found_inf"):
            vars(self.inner).pop(handed, None)

    def begin_step(self, step: int) -> None:
        """Set the number of the coming update; its random numbers depend on it."""
        self._step = step
        if self._before_step is not None:
            self._before_step(step)

    def set_lr_factor(self, factor: float) -> None:
        """Scale every group's peak learning rate."""
        for group, peak in zip(self.inner.param_groups, self._peak_lr, strict=True):
            group["lr"] = peak * factor

    @property
    def lr(self) -> float:
        """Current learning rate of the first group."""
        return float(self.inner.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Return ``<parameter name>/<state name>`` → tensor, sharded as the parameter is where it has its shape.

        A plain number is a scalar under ``<…>#<its type>``.
        """
        if self._rejection is not None:
            self._rejection.settle()
        state: dict[str, torch.Tensor | LocalShard] = {}
        for name, trained in self._trained.items():
            for leaf, value in unpacked_state(self.inner, trained).items():
                if isinstance(value, torch.Tensor):
                    state[f"{name}/{leaf}"] = self._saved(name, value)
                elif value is not None:
                    number = _NUMBERS.get(type(value))
                    if number is None:
                        raise OptimizerStateNotTensor(parameter=name, state=str(leaf), found=type(value).__name__)
                    state[f"{name}/{leaf}#{type(value).__name__}"] = torch.tensor(value, dtype=number)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard]) -> None:
        """Put ``state`` back under this optimizer's parameters: tensors sharded as here, or this rank's shards.

        Raises:
            OptimizerStateDoesNotFit: state of a parameter that is not here.
        """
        self._untried = []
        unknown = sorted({key.rpartition("/")[0] for key in state} - self._named.keys())
        if unknown:
            raise OptimizerStateDoesNotFit(parameters=unknown)
        if self._rejection is not None:
            self._rejection.forget()
        by_name: dict[str, dict[str, torch.Tensor | LocalShard]] = {}
        for key, value in state.items():
            name, _, leaf = key.rpartition("/")
            by_name.setdefault(name, {})[leaf] = value
        # Torch's fused kernels count steps on the device: any other kernel would read the counter of each parameter
        # back to the host in every step.
        groups = [group for group in self.inner.param_groups if group.get("fused") or group.get("capturable")]
        counting_on_device = {id(parameter) for group in groups for parameter in group["params"]}
        for name, leaves in by_name.items():
            trained = self._trained[name]
            loaded: dict[str, torch.Tensor | int | float | bool] = {}
            for leaf, saved in leaves.items():
                plain, _, number = leaf.partition("#")
                value = self._loaded(name, saved)
                if number:
                    loaded[plain] = value.item()
                    continue
                # As torch.optim.Optimizer loads it.
                on_host = plain == "step" and value.dim() == 0 and id(trained) not in counting_on_device
                loaded[plain] = value.to(HOST if on_host else trained.device, copy=True)
            self.inner.state[trained] = packed_state(self.inner, trained, loaded)
            self._untried += [
                f"{name}/{leaf}"
                for leaf, value in loaded.items()
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != trained.shape
            ]

    def _saved(self, name: str, value: torch.Tensor) -> torch.Tensor | LocalShard:
        """A state tensor as a checkpoint has it: sharded as the parameter, without its zeros."""
        if isinstance(self.inner, PackedState) and value.dim() and value.shape == self._shards[name].shape:
            place = self._places[name]  # unpacked on the host, where no DTensor of the device's mesh can be
            return LocalShard(place.real(value), place.shape, place.region)
        parameter = self._named[name]
        sharded = is_dtensor(parameter) and value.shape == local_of(parameter).shape
        like = placed_like(value, parameter) if sharded else value
        if name in self._padded and like.shape == self._named[name].shape:
            return unpadded_shard(like, self._padded[name])
        return like

    def _loaded(self, name: str, value: torch.Tensor | LocalShard) -> torch.Tensor:
        """Return this rank's shard of what :meth:`_saved` gave."""
        if not isinstance(value, LocalShard):
            return local_of(value)
        whole = torch.zeros_like(self._shards[name], dtype=value.tensor.dtype, requires_grad=False)
        self._places[name].real(whole).copy_(value.tensor)
        return whole
