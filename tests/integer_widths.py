"""Backends of ``torch.compile`` that look at integers: which are wider on a GPU than their dtype in the graph says, and
how many operations each element takes.

In Triton a dynamic int, such as a size, has 64 bits. Where a graph adds one to an int32 tensor, inductor (torch 2.11)
generates a sum of 64 bits and believes that it has 32: a bitcast of it does not compile, and products wrap elsewhere. A
cast helps only after an operation with a tensor in memory, for inductor drops that of an expression of dynamic ints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node

__all__ = ["IntegerOperations", "IntegerWidths"]

_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
_COMPUTED = ("start", "step")
"""Arguments of ``iota`` that its values follow from. Other ints of operators are sizes and places."""


@dataclass(eq=False)
class IntegerWidths:
    """Runs graphs as they are, after the decompositions of inductor."""

    found: list[str] = field(default_factory=list)
    """Operations with a narrow result and an operand that has 64 bits in Triton."""
    dynamic: int = 0
    """Graphs with a dynamic int: without one there is nothing to find."""

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile ``graph``, as torch calls a backend."""
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=self._checked, decompositions=select_decomp_table())(
            graph, inputs
        )
        return compiled

    def _checked(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.dynamic += any(isinstance(each, torch.SymInt) for each in inputs)
        for module in graph.modules():
            if isinstance(module, GraphModule):
                self.found.extend(_widened(module))
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed


@dataclass(eq=False)
class IntegerOperations:
    """Counts operations with an integer for each element as result, after the decompositions of inductor."""

    found: Counter[str] = field(default_factory=Counter)
    """By name of the operator. Equal ones count once, as in a kernel; views and the elements' own numbers do not."""

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile ``graph``, as torch calls a backend."""
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=self._counted, decompositions=select_decomp_table())(
            graph, inputs
        )
        return compiled

    def _counted(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        for node in fx_graph_cse(graph.graph).nodes:
            value, target = node.meta.get("val"), node.target
            if not isinstance(value, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
                continue
            computed = not target.is_view and target.name() not in _NO_OPERATIONS
            self.found[target.name()] += computed and value.dim() > 0 and value.dtype in _NARROW
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed


_NO_OPERATIONS = ("prims::iota", "aten::view.dtype")


def _widened(graph: GraphModule) -> Iterator[str]:
    of_ints: dict[Node, bool] = {}
    """Values that no tensor in memory is a part of, and whether a dynamic int is."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            of_ints[node] = True
        elif isinstance(value, torch.Tensor) and isinstance(node.target, torch._ops.OpOverload):
            operands = [*_operands(node)]
            wide = any(of_ints.get(each, False) for each in operands)
            if all(each in of_ints for each in operands):
                of_ints[node] = wide
            if wide and value.dtype in _NARROW:
                yield f"{value.dtype}: {node.format_node()}"


def _operands(node: Node) -> Iterator[Node]:
    """Tensors and numbers that are computed with."""
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.name in _COMPUTED or any(kind in str(argument.type) for kind in ("Tensor", "number")):
            yield from (each for each in (given if isinstance(given, list) else [given]) if isinstance(each, Node))
