"""A precision policy on the modules of a stage: its matrix products, and the weights computed from float32 masters.

FSDP2 casts, gathers, reduces and frees through its own buffers, even with only one rank. :class:`CopiedMasters` cast
each master once per step where no other rank holds the weights, and add each gradient to the master's as soon as it is
available. Under autocast they do so for the weights of matrix products. :func:`rounded_weights` rounds masters
stochastically, so that the cast of FSDP2 is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.placement import local_of, local_shard_of, placed_like
from nxdt_core.engine.optim.updates import BlockKernel, Numbers, StochasticRounding, backend_on, separate_rows
from nxdt_core.engine.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
)
from nxdt_core.errors.layouts import BaseNotQuantised
from nxdt_core.models.patterns import style_of
from nxdt_core.models.quantised import BaseDtype, QuantisedWeight
from nxdt_core.models.random.rounding import noises, rounded
from nxdt_core.models.updates import ProductLinear
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle
from nxdt_core.protocols.precision import LinearProduct

_WITH_SLOT = (ProductLinear, ColumnParallelLinear, RowParallelLinear)
_NOT_LINEAR = ("vocab_embedding", "score_head", "replicate", "heads", "channels")


def apply_product(module: nn.Module, plan: ParallelPlan, product: LinearProduct) -> None:
    """Let ``product`` compute the linear layers of a stage that ``plan.tensor`` names, in place.

    The vocabulary head, layers with tied or quantised weights and experts keep torch's product. With LoRA, the product
    of the frozen weight changes and the update's own products do not.

    Args:
        module: one pipeline stage on the meta device, tensor parallelism applied.
        plan: names the layers.
        product: decides which of them it covers.
    """
    for path, layer, style in [*product_layers(module, plan)]:
        if style == "vocab_head" or isinstance(local_of(layer.weight), QuantisedWeight):
            continue
        out_features, in_features = local_of(layer.weight).shape
        if not product.covers(path, out_features, in_features):
            continue
        if isinstance(layer, _WITH_SLOT):
            layer.product = product
        else:
            module.set_submodule(path, ProductLinear(layer, product))


def quantise_frozen(module: nn.Module, plan: ParallelPlan, dtype: BaseDtype) -> None:
    """Let the weights of :func:`frozen_layers` be codes. Each rank quantises its own part of a weight, when that is
    loaded or drawn.

    Args:
        module: one pipeline stage on the meta device, tensor parallelism applied.
        plan: names the layers.
        dtype: of the codes.

    Raises:
        BaseNotQuantised: a weight has no codes in this layout.
    """
    for path, layer in [*frozen_layers(module, plan)]:
        local_shard = local_shard_of(layer.weight)
        reason, instead = "", "Use another tensor_model_parallel_size"
        if getattr(layer, "padded", None):
            reason = f"'{path}' has rows or columns of zeros on each rank (distributed_strategy.pad_heads)"
        elif local_shard.tensor.dtype == torch.float64:
            reason, instead = f"'{path}' has float64 weights", "Train in another dtype (precision.type)"
        if reason:
            raise BaseNotQuantised(dtype=dtype, reason=reason, instead=instead)
        places = [
            row * local_shard.region.shape[1] + column
            for _, (row, column) in local_shard.region.samples(local_shard.shape)
        ]
        quantised = QuantisedWeight.empty(local_shard.tensor, dtype, places)
        layer.weight = nn.Parameter(placed_like(quantised, layer.weight), requires_grad=False)


def frozen_layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, Any]]:
    """Yield path and layer of those of :func:`product_layers` with a frozen weight, the vocabulary head excepted."""
    for path, layer, style in product_layers(module, plan):
        if style != "vocab_head" and not layer.weight.requires_grad:
            yield path, layer


def product_layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, Any, TensorStyle]]:
    """Yield path, layer and style of the linear layers that the plan lets tensor parallelism cut.

    Those with tied weights are left out: something else reads them as well.
    """
    tied = {name for pair in plan.tied for name in pair}
    for path, part in module.named_modules():
        style = style_of(plan, path)
        if style is None or style in _NOT_LINEAR or f"{path}.weight" in tied:
            continue
        supported = isinstance(part, (*_WITH_SLOT, VocabParallelHead))
        if supported or (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward):
            yield path, part, style


class CopiedMasters:
    """Copies of trained parameters in the compute dtype, which replace them while the modules run.

    Outside of that the modules have their masters, and the copies mostly no memory.
    """

    def __init__(self, modules: Sequence[nn.Module], masters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        """``masters``: parameters of ``modules`` that get copies; ``dtype``: of the copies."""
        self.stay = False
        """True where copies keep their memory, whose addresses recordings of passes have."""
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        """Module, name in it, master, copy."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        copies: dict[int, nn.Parameter] = {}
        for master in masters:
            with torch.no_grad():  # a copy without memory
                local = torch.empty_like(local_of(master), dtype=dtype, memory_format=torch.contiguous_format)
                local.untyped_storage().resize_(0)
                copy = copies[id(master)] = nn.Parameter(placed_like(local, master))
            copy.register_post_accumulate_grad_hook(partial(_add_to_master, master))  # type: ignore[no-untyped-call]
            self._pairs.append((master, copy))
        for module in (part for whole in modules for part in whole.modules()):
            for name, master in module.named_parameters(recurse=False):
                if id(master) in copies:
                    self._places.append((module, name, master, copies[id(master)]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules have copies of the current masters within the block."""
        with torch.no_grad():
            for _, copy in self._pairs:
                local = local_of(copy)
                if local.untyped_storage().nbytes() != local.nbytes:  # CUDA allocates again for the same size
                    local.untyped_storage().resize_(local.nbytes)
            copies = [local_of(copy).detach() for _, copy in self._pairs]
            torch._foreach_copy_(copies, [local_of(master).detach() for master, _ in self._pairs])
            for module, name, _, copy in self._places:
                module._parameters[name] = copy
        try:
            yield
        finally:
            for module, name, master, copy in self._places:
                module._parameters[name] = master
                if not self.stay:
                    local_of(copy).untyped_storage().resize_(0)


def _add_to_master(master: nn.Parameter, copy: torch.Tensor) -> None:
    """Add the gradient of a copy to that of its master."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        local_of(master.grad).add_(local_of(gradient))


@contextmanager
def rounded_weights(
    parameters: Sequence[tuple[nn.Parameter, str, ParameterShard]], rounding: StochasticRounding, step: int
) -> Iterator[None]:
    """Round float32 shards to values of bfloat16 within the block, so that the cast when they are gathered is exact.

    However often a layer is gathered in a step, its copy is the same. The masters are kept too: 4 bytes per element
    of this rank's shards.

    Args:
        parameters: with the global name and the place of this rank's elements in the whole.
        rounding: seed of the rounding.
        step: number of the step in the run.
    """
    copies: list[torch.Tensor] = []
    if parameters:
        device = local_of(parameters[0][0]).device
        backend = backend_on(device)
        kernel = BlockKernel(_copy_and_round, backend=backend)
        keys = separate_rows(rounding.keys(step, [name for _, name, _ in parameters], device), backend)
        for (parameter, _, place), key in zip(parameters, keys, strict=True):
            shard = local_of(parameter).detach()
            copies.append(torch.empty_like(shard))
            kernel(place, (shard, copies[-1]), key)
    try:
        yield
    finally:
        if copies:  # read again: FSDP2 may have moved a shard that it had to pad
            torch._foreach_copy_([local_of(parameter).detach() for parameter, _, _ in parameters], copies)


def _copy_and_round(shard: torch.Tensor, copy: torch.Tensor, numbers: Numbers, key: torch.Tensor) -> None:
    copy.copy_(shard)  # first: in a graph whose first input is the shard, torch 2.13 copies what is written to it below
    shard.copy_(rounded(shard, *noises(numbers.hashed(shard, key), 1)))
