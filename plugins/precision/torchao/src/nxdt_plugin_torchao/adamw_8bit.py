"""AdamW with running means in 8 bits per element; see :mod:`nxdt_plugin_torchao.blocks`.

Each update is computed in float32. Checkpoints have the running means in float32 under the names of torch's AdamW, so
that they fit any layout, and a run can change to ``adamw`` and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.optimizer import PackedState, ParameterGroup, as_torch, shards_of
from nxdt_plugin_torchao.blocks import RowBlocks, dequantised, quantised
from nxdt_plugin_torchao.config import AdamW8bitConfig
from nxdt_plugin_torchao.errors import No8bitStateHere

_MEANS = {"exp_avg": True, "exp_avg_sq": False}
"""The running means, and whether they have signs."""
_AT_A_TIME = 2**24
"""Elements whose running means exist in float32 at a time."""
_DEVICES = ("cuda", "cpu", "meta")


class AdamW8bit(torch.optim.Optimizer, PackedState):
    """AdamW; matrices have codes and, under ``<name>_scale``, scaling factors as state, the rest has float32."""

    def __init__(self, groups: list[ParameterGroup], config: AdamW8bitConfig) -> None:
        """``config``: which matrices have 8 bits, and in what blocks.

        Raises:
            No8bitStateHere: the parameters are neither on a GPU nor on the host.
        """
        super().__init__(as_torch(groups), {"betas": config.betas, "eps": config.eps})
        self._config = config
        self._shards = shards_of(groups)
        for device in {parameter.device for group in groups for parameter in group["params"]}:
            self.check_device(device)

    @staticmethod
    def check_device(device: torch.device) -> None:
        """Refuse a device on which the optimizer was never tried.

        Raises:
            No8bitStateHere: it is neither a GPU nor the host.
        """
        if device.type not in _DEVICES:
            raise No8bitStateHere(device=device.type)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def unpacked(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of ``parameter`` as checkpoints have it, on the host where it is in 8 bits here; see
        :class:`nxdt_core.protocols.optimizer.PackedState`."""
        state: Mapping[str, Any] = self.state.get(parameter, {})
        blocks = self._blocks(parameter)
        if blocks is None or not state:
            return state
        whole_state = {name: value for name, value in state.items() if not name.endswith("_scale")}
        for name, signed in _MEANS.items():
            codes, scales = state[name], state[f"{name}_scale"]
            whole = torch.empty_like(codes, dtype=torch.float32)
            for part in _parts(codes):
                whole[part] = dequantised(codes[part], scales[part], blocks, signed=signed)
            whole_state[name] = whole.to(HOST)
        return whole_state

    def packed(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :meth:`unpacked` returned as this optimizer keeps it, bitwise the same."""
        blocks = self._blocks(parameter)
        if blocks is None:
            return dict(state)
        packed_state: dict[str, Any] = {}
        for name, value in state.items():
            if name not in _MEANS:
                packed_state[name] = value
                continue
            packed_state |= _nothing(name, parameter, blocks)
            for part in _parts(parameter):
                codes, scales = quantised(value[part], blocks, signed=_MEANS[name])
                packed_state[name][part], packed_state[f"{name}_scale"][part] = codes, scales
        return packed_state

    def _blocks(self, parameter: torch.Tensor) -> RowBlocks | None:
        """Return the blocks of a parameter whose state is in 8 bits. The whole shape decides, in any layout."""
        shard, config = self._shards[parameter], self._config
        elements = math.prod(shard.shape)
        if len(shard.shape) < 2 or shard.shape[-1] < config.block_size or elements < max(1, config.min_8bit_size):
            return None
        return RowBlocks.of(shard, parameter.shape[-1], config.block_size)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        blocks, grad = self._blocks(parameter), parameter.grad
        assert grad is not None
        state: dict[str, torch.Tensor] = self.state[parameter]
        weight, wide = parameter.detach(), torch.promote_types(parameter.dtype, torch.float32)
        if not state:
            state["step"] = torch.zeros((), device=HOST)
            for name in _MEANS:
                if blocks is None:
                    state[name] = torch.zeros_like(parameter, dtype=wide)
                else:
                    state |= _nothing(name, parameter, blocks)
        state["step"] += 1
        if blocks is None:
            _adamw(weight, grad, (state["exp_avg"], state["exp_avg_sq"]), group, float(state["step"]))
            return
        for part in _parts(parameter):
            packed = {name: (state[name][part], state[f"{name}_scale"][part]) for name in _MEANS}
            means = [dequantised(*packed[name], blocks, signed=signed).to(wide) for name, signed in _MEANS.items()]
            _adamw(weight[part], grad[part], means, group, float(state["step"]))
            for (name, signed), mean in zip(_MEANS.items(), means, strict=True):
                for target, values in zip(packed[name], quantised(mean, blocks, signed=signed), strict=True):
                    target.copy_(values)


def _adamw(
    weight: torch.Tensor, grad: torch.Tensor, means: Sequence[torch.Tensor], group: dict[str, Any], step: float
) -> None:
    """Update a weight and its running means, which are in float32 at least, in place."""
    (mean, square), (beta1, beta2) = means, group["betas"]
    grad, updated = grad.to(mean.dtype), weight.to(mean.dtype)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    updated.mul_(1 - group["lr"] * group["weight_decay"])
    updated.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
    if updated is not weight:
        weight.copy_(updated)


def _nothing(name: str, parameter: torch.Tensor, blocks: RowBlocks) -> dict[str, torch.Tensor]:
    """Return a running mean of zeros."""
    zeros = torch.zeros(1, parameter.shape[-1], device=parameter.device)
    codes, scales = quantised(zeros, blocks, signed=_MEANS[name])
    rows = parameter.shape[:-1]
    return {
        name: codes[0].expand(parameter.shape).clone(memory_format=torch.contiguous_format),
        f"{name}_scale": scales[0].expand(*rows, blocks.count).clone(memory_format=torch.contiguous_format),
    }


def _parts(tensor: torch.Tensor) -> Iterator[slice]:
    """Yield parts of the first dimension, of few elements each."""
    rows = max(1, _AT_A_TIME // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)
