"""Products of linear layers: which layers a plan makes of them, and those that a precision policy computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.tensor.layers import ColumnLinear, GatheredColumnLinear, RowLinear
from nxdt_core.engine.tensor.vocabulary_layers import VocabularyHead
from nxdt_core.models.patterns import matches
from nxdt_core.models.updates import ProductLinear
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle
from nxdt_core.protocols.precision import LinearProduct

__all__ = ["apply_product", "product_layers"]

_WITH_SLOT = (ProductLinear, ColumnLinear, GatheredColumnLinear, RowLinear)
_NOT_LINEAR = ("vocab_embedding", "replicate", "heads", "channels")


def apply_product(module: nn.Module, plan: ParallelPlan, product: LinearProduct) -> None:
    """Let ``product`` multiply in the linear layers of a stage that ``plan.tensor`` names, in place.

    The vocabulary head, layers with tied weights and experts keep torch's product. With LoRA, the product of the frozen
    weight changes and the update's own products do not.

    Args:
        module: one pipeline stage on the meta device, tensor parallelism applied.
        plan: names the layers.
        product: decides which of them it covers.
    """
    for path, layer, style in [*product_layers(module, plan)]:
        if style == "vocab_head":
            continue
        out_features, in_features = local_of(layer.weight).shape
        if not product.covers(path, out_features, in_features):
            continue
        if isinstance(layer, _WITH_SLOT):
            layer.product = product
        else:
            module.set_submodule(path, ProductLinear(layer, product))


def product_layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, Any, TensorStyle]]:
    """Yield path, layer and style of the linear layers that the plan lets tensor parallelism cut.

    Those with tied weights are left out: something else reads them as well.
    """
    tied = {name for pair in plan.tied for name in pair}
    for path, part in module.named_modules():
        style = next((style for pattern, style in plan.tensor.items() if matches(pattern, path)), None)
        if style is None or style in _NOT_LINEAR or f"{path}.weight" in tied:
            continue
        known = isinstance(part, (*_WITH_SLOT, VocabularyHead))
        if known or (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward):
            yield path, part, style
