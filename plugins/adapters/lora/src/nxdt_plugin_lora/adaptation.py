"""Low-rank updates of linear layers, embeddings and experts, and how a model gets them and is frozen.

Runs train such a model (:mod:`nxdt_plugin_lora.adapter`); a reader of their checkpoints builds it again
(:mod:`nxdt_plugin_lora.saved_run`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.moe.experts import RowGroups, SwiGLUExperts, grouped_linear
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update, UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import LayerNotAdaptable
from nxdt_plugin_lora.targets import chosen_modules, chosen_targets


class LowRankUpdate(Update):
    """Update of a linear layer: ``product + scaling * (dropout(x) Aᵀ) Bᵀ`` (Hu et al. 2021, arXiv:2106.09685)."""

    follows: Mapping[str, int] = {"lora_A": 1, "lora_B": 0}
    reads_weight = False
    grows = "lora_B"
    """Name of the parameter that starts at zero."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))
        self.scaling = scaling
        self.dropout = Dropout(dropout)

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., in] and ``product`` [..., out] to the latter's shape."""
        narrow = functional.linear(self.dropout(hidden), self.local(self.lora_A))  # [..., rank]
        return _plus_scaled(product, narrow, self.local(self.lora_B), self.scaling)


class DoraUpdate(LowRankUpdate):
    """Low-rank update that also brings the rows of W + s B A to trained norms (Liu et al. 2024, arXiv:2402.09353).

    As there (section 4.3), no gradient passes through the rows' own norms. The norms are those of
    ``|w|² + 2 s w·(Aᵀ b) + s² bᵀ (A Aᵀ) b``: no matrix of the weight's size is made.
    """

    follows: Mapping[str, int] = {**LowRankUpdate.follows, "lora_magnitude": 0}
    reads_weight = True

    def __init__(self, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__(inputs, outputs, rank=rank, scaling=scaling, dropout=dropout)
        self.lora_magnitude = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's product with the update. Under dropout the frozen product keeps its inputs whole, and what
        is trained of it does not, as in peft."""
        down, up = self.local(self.lora_A), self.local(self.lora_B)
        factor = self.local(self.lora_magnitude) / self._norms(weight, down, up)
        dropped = self.dropout(hidden)
        narrow = functional.linear(dropped, down)
        if dropped is hidden:
            return factor * _plus_scaled(product, narrow, up, self.scaling)
        turned = (factor - 1) * functional.linear(dropped, weight)
        return product + turned + factor * self.scaling * functional.linear(narrow, up)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """2-norms of the rows of the updated weight, [out]; never zero."""
        wide = _wide(weight)
        own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * functional.linear(weight, down.to(weight.dtype))).sum(1)
        added = (scaled @ (down.to(wide) @ down.to(wide).t()) * scaled).sum(1)
        return _root(self.over_inputs(own + crossed + added)).to(up.dtype)


class EmbeddingUpdate(Update):
    """Update of an embedding: rows of ``A`` [rows, rank], which starts at zero, times ``B`` [rank, width]."""

    follows: Mapping[str, int] = {"lora_A": 0, "lora_B": 1}
    grows = "lora_A"
    """Name of the parameter that starts at zero."""
    inputs = 0

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rows, rank))
        self.lora_B = nn.Parameter(torch.empty(rank, width))
        self.scaling = scaling

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 [...] and ``product`` [..., width] to the latter's shape."""
        narrow = functional.embedding(ids, self.local(self.lora_A))
        return _plus_scaled(product, narrow, self.local(self.lora_B).t(), self.scaling)


class DoraEmbeddingUpdate(EmbeddingUpdate):
    """Update that also brings the columns of W + s A B to trained norms, as in peft; see :class:`DoraUpdate`."""

    follows: Mapping[str, int] = {**EmbeddingUpdate.follows, "lora_magnitude": 1}

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__(rows, width, rank=rank, scaling=scaling)
        self.lora_magnitude = nn.Parameter(torch.empty(width))

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's embedding with the update, scaled by the magnitudes."""
        norms = self._norms(weight, self.local(self.lora_A), self.local(self.lora_B))
        return self.local(self.lora_magnitude) / norms * super().forward(ids, product, weight)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """2-norms of the columns of the updated table, [width]; never zero."""
        wide = _wide(weight)
        own = torch.linalg.vector_norm(weight, dim=0, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * (down.to(weight.dtype).t() @ weight)).sum(0)
        added = (scaled * (down.to(wide).t() @ down.to(wide) @ scaled)).sum(0)
        return _root(self.over_inputs(own + crossed + added)).to(up.dtype)


class ExpertsUpdate(Update):
    """Update of one matrix of experts [experts, out, in]: each expert has its own, from its own rows."""

    follows: Mapping[str, int] = {"lora_A": 2, "lora_B": 1}
    grows = "lora_B"
    """Name of the parameter that starts at zero."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank))
        self.scaling = scaling
        self.dropout = Dropout(dropout, dispatched=True)

    def forward(
        self, rows: torch.Tensor, product: torch.Tensor, weight: torch.Tensor, groups: RowGroups | None
    ) -> torch.Tensor:
        """``rows``, ``groups`` and the result as of :func:`nxdt_core.models.moe.experts.grouped_linear`."""
        narrow = grouped_linear(self.dropout(rows), self.local(self.lora_A), groups)
        return product + self.scaling * grouped_linear(narrow, self.local(self.lora_B), groups)


def _wide(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums of squares of ``weight`` are computed."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _root(squares: torch.Tensor) -> torch.Tensor:
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def _plus_scaled(product: torch.Tensor, narrow: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """``product + scaling * narrow @ upᵀ`` in one kernel, which makes no second tensor of that size."""
    flat = product.reshape(-1, product.shape[-1])
    return torch.addmm(flat, narrow.reshape(-1, narrow.shape[-1]), up.t(), alpha=scaling).view(product.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """Result of :func:`adapt`."""

    plan: ParallelPlan
    """The plan of the changed model."""
    rules: Sequence[InitRule]
    """Rules that initialise the parameters that were added."""
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
    exempt = (*plan.no_weight_decay, "*.lora_magnitude")
    changed = replace(plan, no_weight_decay=exempt, lr_scales=_scales(module, config.loraplus_lr_ratio))
    return Adapted(plan=changed, rules=updates.rules, targets=tuple(targets))


def _scales(module: nn.Module, ratio: float) -> dict[str, float]:
    """Return the factor on the learning rate of what LoRA+ lets learn at the rate of B."""
    if ratio == 1.0:
        return {}
    tables = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, UpdatedEmbedding))
    return {
        name: ratio
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and (parameter.ndim == 1 or (name.endswith(".lora_B") and not name.startswith(tables)))
    }


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
