"""The component ``lora``: freezes a model, gives layers their updates, and says how these start."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from nxdt_core.config import ResolvedConfig
from nxdt_core.nn.moe.experts import SwiGLUExperts
from nxdt_core.nn.updates import UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.parallel.engine import ParallelEngine, ParallelModel
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.dora_magnitudes import init_magnitudes
from nxdt_plugin_lora.errors import LayerNotAdaptable
from nxdt_plugin_lora.loading import check_options, load_adapter
from nxdt_plugin_lora.reference import changes_base, check_reference
from nxdt_plugin_lora.targets import chosen_modules, chosen_targets
from nxdt_plugin_lora.updates import DoraEmbeddingUpdate, DoraUpdate, EmbeddingUpdate, ExpertsUpdate, LowRankUpdate

__all__ = ["LoraAdapter"]

_log = logging.getLogger(__name__)


class LoraAdapter:
    """An :class:`~nxdt_core.protocols.adapter.Adapter`."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self._rules: list[InitRule] = []

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze ``module`` and add updates, in place.

        Raises:
            TargetNotFound: a name in the configuration means nothing.
            TargetSavedWhole: a target trains whole already.
            LayerNotAdaptable: an option does not fit a layer.
        """
        if not self.config.enable_lora:
            return plan
        whole = chosen_modules(module, self.config.modules_to_save)
        targets = chosen_targets(module, plan, self.config.target_modules, whole)
        module.requires_grad_(False)
        self._rules = []
        for path, layer in targets.items():
            self._adapt(module, path, layer)
        for path in whole:
            module.get_submodule(path).requires_grad_(True)
        self._free_biases(module, targets)
        if self.config.lora_verbose:
            _log.warning("LoRA of rank %d on %d layers: %s", self.config.lora_rank, len(targets), ", ".join(targets))
        return replace(plan, no_weight_decay=(*plan.no_weight_decay, "*.lora_magnitude"))

    @property
    def saves_base(self) -> bool:
        """``save_lora_base``."""
        return self.config.save_lora_base or not self.config.enable_lora

    def begin(self, model: ParallelModel, config: ResolvedConfig, engine: ParallelEngine) -> None:
        """Load the adapter that the run starts from, or set DoRA's norms to those of the weights.

        Raises:
            BaseIsNoReference: that adapter changes the base, which the objective takes for the model of the beginning.
        """
        if not self.config.enable_lora:
            return
        if self.config.use_dora and not changes_base(model, engine):  # else the norms came with the updates
            init_magnitudes(model)
        if self.config.load_lora_from_ckpt:
            load_adapter(self.config, model, config, engine)
        check_reference(model, config, engine)

    def check_going_on(self, saved: Mapping[str, Any], where: str) -> None:
        """As the protocol says: other scales and forms of the updates are refused."""
        if self.config.enable_lora and saved.get("name") == "lora" and saved.get("enable_lora"):
            check_options(self.config, saved, where)

    def finish(self, checkpoint: str | None, config: ResolvedConfig, ranks: RankAgreement) -> None:
        """Merge the last checkpoint, where ``merge_lora`` asks for it."""
        if not self.config.merge_lora:
            return
        if checkpoint is None:
            _log.warning("merge_lora: the run has saved no checkpoint, so nothing is merged")
            return
        from nxdt_plugin_lora.run_files import merge_last  # it opens checkpoints with this class

        merge_last(checkpoint, config, ranks)

    def init_rules(self) -> Sequence[InitRule]:
        """For the parameters that :meth:`apply` has added: an update starts at zero. DoRA's norms are the weights' own,
        and are set once those are there."""
        return self._rules

    def _adapt(self, module: nn.Module, path: str, layer: nn.Module) -> None:
        config = self.config
        rank, scaling, dropout = config.lora_rank, config.scaling, config.lora_dropout
        if isinstance(layer, nn.Linear):
            make = DoraUpdate if config.use_dora else LowRankUpdate
            inputs, outputs = layer.in_features, layer.out_features
            update = make(inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
            module.set_submodule(path, UpdatedLinear(layer, update))
            self._start(f"{path}.update", grows=update.grows, other=self._drawn("lora_A", inputs))
            return
        if isinstance(layer, nn.Embedding):
            make_table = DoraEmbeddingUpdate if config.use_dora else EmbeddingUpdate
            table = make_table(layer.num_embeddings, layer.embedding_dim, rank=rank, scaling=scaling)
            module.set_submodule(path, UpdatedEmbedding(layer, table))
            other = InitRule(pattern="lora_B", distribution="normal", std=1.0)
            self._start(f"{path}.update", grows=table.grows, other=other)
            return
        assert isinstance(layer, SwiGLUExperts)
        if config.use_dora:
            raise LayerNotAdaptable(path=path, layer="a matrix of experts", option="use_dora")
        owner, _, matrix = path.rpartition(".")
        experts, outputs, inputs = getattr(layer, matrix).shape
        each = ExpertsUpdate(experts, inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
        layer.updates[matrix] = each
        self._start(f"{owner}.updates.{matrix}", grows=each.grows, other=self._drawn("lora_A", inputs))

    def _drawn(self, leaf: str, inputs: int) -> InitRule:
        """As peft does: uniform as of a linear layer of torch (He et al. 2015 with a = sqrt 5), or normal."""
        if self.config.init_lora_weights == "gaussian":
            return InitRule(pattern=leaf, distribution="normal", std=1 / self.config.lora_rank)
        return InitRule(pattern=leaf, distribution="uniform", std=1 / math.sqrt(inputs))

    def _start(self, path: str, *, grows: str, other: InitRule) -> None:
        """Rules of one update; layers that are alike share them."""
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        shared = (
            replace(other, pattern=f"{pattern}.{other.pattern}"),
            InitRule(pattern=f"{pattern}.{grows}", distribution="constant"),
            InitRule(pattern=f"{pattern}.lora_magnitude", distribution="constant", mean=1.0),
        )
        known = {rule.pattern: rule for rule in self._rules}
        if known.get(shared[0].pattern, shared[0]) != shared[0]:  # a layer of another size under the same pattern
            self._rules.insert(0, replace(other, pattern=f"{path}.{other.pattern}"))
        self._rules += [rule for rule in shared if rule.pattern not in known]

    def _free_biases(self, module: nn.Module, targets: dict[str, nn.Module]) -> None:
        if self.config.biases == "none":
            return
        for path, part in module.named_modules():
            bias = getattr(part, "bias", None)
            if isinstance(bias, nn.Parameter) and (self.config.biases == "all" or path in targets):
                bias.requires_grad_(True)
