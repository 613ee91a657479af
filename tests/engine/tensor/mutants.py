"""Wrong implementations of tensor parallelism, each a patch of the right one, that the tests must see."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch import nn

from nxdt_core.engine.data import gradients
from nxdt_core.engine.tensor import apply, layers
from nxdt_core.models import loss


def _all_in_loss(labels, weights, dtype):
    return torch.ones(labels.numel(), dtype=dtype)


def _sum_with_its_own_transpose(partial, group, *, sequence_parallel):
    """The sum whose gradient is summed as well, as if each rank had a loss of its own."""
    return layers.copy_to_group(layers.reduce_from_group(partial, group), group)


def _summed_twice(self, ids, forward=layers.VocabParallelEmbedding.forward):
    with mock.patch.object(layers, "sum_over_ranks", _sum_with_its_own_transpose):
        return forward(self, ids)


def _nothing_elsewhere(ids, rows, group):
    return ids % rows, torch.zeros_like(ids, dtype=torch.bool)


def _bias_before_sum(self, hidden):
    partial = nn.functional.linear(hidden, self.weight.to_local(), self.bias)
    return layers.sum_over_ranks(partial, self.group, sequence_parallel=self.sequence_parallel)


def _zeros_take_part(self, hidden):
    partial = nn.functional.linear(hidden, self.weight.to_local())
    total = layers.sum_over_ranks(partial, self.group, sequence_parallel=self.sequence_parallel)
    return total if self.bias is None else total + self.bias


MUTANTS: dict[str | None, Callable[[], AbstractContextManager[object]]] = {
    None: nullcontext,
    "no f at the entry of a block": lambda: mock.patch.object(layers, "copy_to_group", lambda t, g: t),
    "norms not summed": lambda: mock.patch.object(apply, "partial_parameters", return_value=frozenset()),
    "copies of heads not summed": lambda: mock.patch.object(gradients, "sharded_over", return_value=frozenset()),
    "-100 in the loss": lambda: mock.patch.object(loss, "row_weights", _all_in_loss),
    "embedding's gradient summed": lambda: mock.patch.object(layers.VocabParallelEmbedding, "forward", _summed_twice),
    "embedding's ids not masked": lambda: mock.patch.object(layers, "local_vocab_rows", _nothing_elsewhere),
    "bias before the sum": lambda: mock.patch.object(layers.RowParallelLinear, "forward", _bias_before_sum),
    "zeros take part": lambda: mock.patch.object(layers.RowParallelLinear, "forward", _zeros_take_part),
}
"""What a wrong implementation would do."""
