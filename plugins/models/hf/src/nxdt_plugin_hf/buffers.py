"""Buffers that are saved like weights, such as the correction of DeepSeek-V3's routers (arXiv:2412.19437)."""

from __future__ import annotations

from torch import nn

__all__ = ["as_frozen_parameters"]


def as_frozen_parameters(model: nn.Module) -> None:
    """Make them parameters that are not trained: these are drawn, sharded, saved and exchanged with the others.

    Integers stay buffers.
    """
    for module in model.modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        for name in sorted(saved):
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
