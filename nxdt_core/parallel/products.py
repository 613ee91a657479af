"""Products of linear layers that a precision policy computes: which layers they are, and where they are called."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from nxdt_core.distributed.placement import local_of
from nxdt_core.nn.patterns import matches
from nxdt_core.nn.updates import ProductLinear, UpdatedLinear
from nxdt_core.parallel.tensor.layers import ColumnLinear, GatheredColumnLinear, RowLinear
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import LinearProduct

__all__ = ["apply_product"]

_WithSlot = ColumnLinear | GatheredColumnLinear | RowLinear | UpdatedLinear
_OTHER_STYLES = ("vocab_head", "vocab_embedding", "replicate", "heads", "channels")


def apply_product(module: nn.Module, plan: ParallelPlan, product: LinearProduct) -> None:
    """Let ``product`` multiply in the linear layers of a stage that ``plan.tensor`` names, in place.

    The vocabulary head, layers with tied weights and experts keep torch's product. With LoRA, the product of the frozen
    weight changes and the update's own products do not.

    Args:
        module: one pipeline stage on the meta device, tensor parallelism applied.
        plan: names the layers.
        product: decides which of them it covers.
    """
    for path, layer in [*_layers(module, plan)]:
        out_features, in_features = local_of(layer.weight).shape
        if not product.covers(path, out_features, in_features):
            continue
        if isinstance(layer, _WithSlot):
            layer.product = product
        else:
            module.set_submodule(path, ProductLinear(layer, product))


def _layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, _WithSlot | nn.Linear]]:
    tied = {name for pair in plan.tied for name in pair}
    for path, part in module.named_modules():
        style = next((style for pattern, style in plan.tensor.items() if matches(pattern, path)), None)
        if style is None or style in _OTHER_STYLES or f"{path}.weight" in tied:
            continue
        if isinstance(part, _WithSlot) or (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward):
            yield path, part
