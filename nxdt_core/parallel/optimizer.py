"""Parameter groups by the plan's decay rules, and an optimizer whose state has global names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from nxdt_core.errors import OptimizerStateDoesNotFit, OptimizerStateNotTensor
from nxdt_core.nn.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["TorchOptimizer", "parameter_groups"]

_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}
"""Python numbers that an optimizer may keep as state, and the dtype that holds them exactly."""


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    plan: ParallelPlan,
    *,
    lr: float,
    weight_decay: float,
    decay_norms: bool,
) -> list[ParameterGroup]:
    """Split the trainable parameters into a decayed and an undecayed group; an empty one is left out.

    Args:
        parameters: (global name, parameter) pairs.
        plan: its ``no_weight_decay`` patterns are never decayed, its ``norms`` only with ``decay_norms``.
        lr: peak learning rate of both groups.
        weight_decay: of the decayed group; the other has 0.
        decay_norms: ``model.do_layer_norm_weight_decay``.
    """
    exempt = plan.no_weight_decay if decay_norms else (*plan.no_weight_decay, *plan.norms)
    groups = [
        ParameterGroup(params=[], names=[], lr=lr, weight_decay=weight_decay),
        ParameterGroup(params=[], names=[], lr=lr, weight_decay=0.0),
    ]
    for name, parameter in parameters:
        if parameter.requires_grad:
            group = groups[matches_any(exempt, name)]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


class TorchOptimizer:
    """A stock optimizer over whole parameters; see :class:`nxdt_core.protocols.engine.ParallelOptimizer`."""

    def __init__(self, inner: torch.optim.Optimizer, groups: list[ParameterGroup]) -> None:
        self.inner = inner
        self._named = {
            name: parameter for group in groups for name, parameter in zip(group["names"], group["params"], strict=True)
        }
        self._peak_lr = [float(group["lr"]) for group in inner.param_groups]

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """2-norm over all gradients, before clipping; a device scalar."""
        parameters = list(self._named.values())
        if max_norm is not None:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self) -> None:
        """Update, then drop the gradients."""
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def set_lr_factor(self, factor: float) -> None:
        """Scale every group's peak learning rate."""
        for group, peak in zip(self.inner.param_groups, self._peak_lr, strict=True):
            group["lr"] = peak * factor

    @property
    def lr(self) -> float:
        """Current learning rate of the first group."""
        return float(self.inner.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``<parameter name>/<state name>`` → tensor; a plain number is a scalar under ``<…>#<its type>``."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._named.items():
            for leaf, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state[f"{name}/{leaf}"] = value
                elif value is not None:
                    number = _NUMBERS.get(type(value))
                    if number is None:
                        raise OptimizerStateNotTensor(parameter=name, state=str(leaf), found=type(value).__name__)
                    state[f"{name}/{leaf}#{type(value).__name__}"] = torch.tensor(value, dtype=number)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put ``state`` back under this optimizer's parameters.

        Raises:
            OptimizerStateDoesNotFit: state of a parameter that is not here.
        """
        unknown = sorted({key.rpartition("/")[0] for key in state} - self._named.keys())
        if unknown:
            raise OptimizerStateDoesNotFit(parameters=unknown)
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            name, _, leaf = key.rpartition("/")
            by_name.setdefault(name, {})[leaf] = value
        for name, leaves in by_name.items():
            parameter = self._named[name]
            self.inner.state[parameter] = dict(_leaf(leaf, value, parameter) for leaf, value in leaves.items())


def _leaf(name: str, value: torch.Tensor, parameter: nn.Parameter) -> tuple[str, torch.Tensor | int | float | bool]:
    """A state entry as the optimizer had it: a number where the name says so, else a tensor of its own."""
    plain, _, number = name.partition("#")
    return plain, value.item() if number else value.to(parameter.device, copy=True)
