"""Changes a model for LoRA: freezes it, gives layers their updates, and says how these start.

Runs train such a model (:mod:`nxdt_plugin_lora.adapter`); a reader of their checkpoints builds it again
(:mod:`nxdt_plugin_lora.saved_run`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.updates import UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import LayerNotAdaptable
from nxdt_plugin_lora.targets import chosen_modules, chosen_targets
from nxdt_plugin_lora.updates import DoraEmbeddingUpdate, DoraUpdate, EmbeddingUpdate, ExpertsUpdate, LowRankUpdate

__all__ = ["Adapted", "adapt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """What :func:`adapt` did to a model."""

    plan: ParallelPlan
    """The plan of the changed model."""
    rules: Sequence[InitRule]
    """How the parameters start that were added."""
    targets: Sequence[str]
    """Paths of the layers that have an update."""


def adapt(module: nn.Module, plan: ParallelPlan, config: LoraConfig) -> Adapted:
    """Freeze ``module`` and add updates, in place.

    Raises:
        TargetNotFound: a name in the configuration matches no layer.
        TargetSavedWhole: a target trains whole already.
        LayerNotAdaptable: an option does not fit a layer.
    """
    whole = chosen_modules(module, config.modules_to_save)
    targets = chosen_targets(module, plan, config.target_modules, whole)
    module.requires_grad_(False)
    updates = _Updates(config)
    for path, layer in targets.items():
        updates.add(module, path, layer)
    for path in whole:
        module.get_submodule(path).requires_grad_(True)
    _free_biases(module, targets, config)
    changed = replace(plan, no_weight_decay=(*plan.no_weight_decay, "*.lora_magnitude"))
    return Adapted(plan=changed, rules=updates.rules, targets=tuple(targets))


def _free_biases(module: nn.Module, targets: Iterable[str], config: LoraConfig) -> None:
    if config.biases == "none":
        return
    paths = set(targets)
    for path, part in module.named_modules():
        bias = getattr(part, "bias", None)
        if isinstance(bias, nn.Parameter) and (config.biases == "all" or path in paths):
            bias.requires_grad_(True)


class _Updates:
    """Adds updates to layers and collects the rules by which they start."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self.rules: list[InitRule] = []

    def add(self, module: nn.Module, path: str, layer: nn.Module) -> None:
        """Give the layer at ``path`` its update."""
        config = self._config
        rank, scaling, dropout = config.lora_rank, config.scaling, config.lora_dropout
        if isinstance(layer, nn.Linear):
            make = DoraUpdate if config.use_dora else LowRankUpdate
            inputs, outputs = layer.in_features, layer.out_features
            update = make(inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
            module.set_submodule(path, UpdatedLinear(layer, update))
            self._add_rules(f"{path}.update", grows=update.grows, other=self._drawn("lora_A", inputs))
            return
        if isinstance(layer, nn.Embedding):
            make_table = DoraEmbeddingUpdate if config.use_dora else EmbeddingUpdate
            table = make_table(layer.num_embeddings, layer.embedding_dim, rank=rank, scaling=scaling)
            module.set_submodule(path, UpdatedEmbedding(layer, table))
            other = InitRule(pattern="lora_B", distribution="normal", std=1.0)
            self._add_rules(f"{path}.update", grows=table.grows, other=other)
            return
        assert isinstance(layer, SwiGLUExperts)
        if config.use_dora:
            raise LayerNotAdaptable(path=path, layer="a matrix of experts", option="use_dora")
        owner, _, matrix = path.rpartition(".")
        experts, outputs, inputs = getattr(layer, matrix).shape
        each = ExpertsUpdate(experts, inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
        layer.updates[matrix] = each
        self._add_rules(f"{owner}.updates.{matrix}", grows=each.grows, other=self._drawn("lora_A", inputs))

    def _drawn(self, leaf: str, inputs: int) -> InitRule:
        """Return the initialisation that peft uses: uniform as of a linear layer of torch (He et al. 2015 with a = sqrt
        5), or normal."""
        if self._config.init_lora_weights == "gaussian":
            return InitRule(pattern=leaf, distribution="normal", std=1 / self._config.lora_rank)
        return InitRule(pattern=leaf, distribution="uniform", std=1 / math.sqrt(inputs))

    def _add_rules(self, path: str, *, grows: str, other: InitRule) -> None:
        """Add the rules of one update; equal layers share them."""
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        shared = [
            replace(other, pattern=f"{pattern}.{other.pattern}"),
            InitRule(pattern=f"{pattern}.{grows}", distribution="constant"),
        ]
        if self._config.use_dora:
            shared.append(InitRule(pattern=f"{pattern}.lora_magnitude", distribution="constant", mean=1.0))
        known = {rule.pattern: rule for rule in self.rules}
        if known.get(shared[0].pattern, shared[0]) != shared[0]:  # a layer of another size under the same pattern
            self.rules.insert(0, replace(other, pattern=f"{path}.{other.pattern}"))
        self.rules += [rule for rule in shared if rule.pattern not in known]
