"""``torch.compile`` of a function into one graph, which also runs where torch does not compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["one_graph"]

Result = TypeVar("Result")


def one_graph(function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """Return ``function`` compiled into one graph when it first runs.

    Under a dispatch mode of the caller, such as :class:`torch.utils.flop_counter.FlopCounterMode`, torch runs every
    operation eagerly, so that the mode sees it, and then raises an error because there is no graph. Here the function
    runs as written instead.

    Args:
        function: to compile; it breaks the graph nowhere.
        options: of :func:`torch.compile`, such as ``backend`` and ``dynamic``.
    """
    compiled: Callable[..., Result] = torch.compile(function, fullgraph=True, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        observed = is_in_torch_dispatch_mode(include_infra_modes=False)
        return function(*args, **kwargs) if observed else compiled(*args, **kwargs)

    return call
