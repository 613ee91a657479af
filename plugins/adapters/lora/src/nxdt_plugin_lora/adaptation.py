"""Low-rank updates of linear layers, embeddings and experts, which layers get them, and how the model is frozen.

Runs train such a model (:mod:`nxdt_plugin_lora.adapter`); a reader of their checkpoints builds it again
(:mod:`nxdt_plugin_lora.saved_run`).
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import meta_device
from nxdt_core.models.moe.experts import RowGroups, SwiGLUExperts, grouped_linear
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update, UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_lora.config import ALL_LINEAR, LoraConfig, ends_in
from nxdt_plugin_lora.errors import LayerNotAdaptable, TargetNotFound, TargetSavedWhole

_SEPARATE: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused matrices of NxD Training → what they are where a model keeps them apart."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of experts."""


class LowRankUpdate(Update):
    """Update of a linear layer: ``product + scaling * (dropout(x) Aᵀ) Bᵀ`` (Hu et al. 2021, arXiv:2106.09685)."""

    sharded_like: Mapping[str, int] = {"lora_A": 1, "lora_B": 0}
    reads_weight = False
    zero_initialised = "lora_B"
    """Name of the parameter that starts at zero."""

    def __init__(
        self, inputs: int, outputs: int, *, rank: int, scaling: float, dropout: float, residual: bool = False
    ) -> None:
        """``residual``: subtract the product of frozen initial values, ``lora_A0`` and ``lora_B0``, from the weight."""
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))
        self.scaling, self.residual = scaling, residual
        self.dropout = Dropout(dropout)
        if residual:
            self.lora_A0 = nn.Parameter(torch.empty(rank, inputs), requires_grad=False)
            self.lora_B0 = nn.Parameter(torch.empty(outputs, rank), requires_grad=False)
            self.sharded_like = {**self.sharded_like, "lora_A0": 1, "lora_B0": 0}

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., in] and ``product`` [..., out] to the latter's shape."""
        low_rank = functional.linear(self.dropout(hidden), self.local(self.lora_A))  # [..., rank]
        return _plus_scaled(self.of_residual(hidden, product), low_rank, self.local(self.lora_B), self.scaling)

    def of_residual(self, hidden: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Return the product of ``hidden`` and the residual, where ``product`` is that of the whole weight."""
        if not self.residual:
            return product
        low_rank = functional.linear(hidden, self.local(self.lora_A0))
        return _plus_scaled(product, low_rank, self.local(self.lora_B0), -self.scaling)


class DoraUpdate(LowRankUpdate):
    """Low-rank update that also brings the rows of W + s B A to trained norms (Liu et al. 2024, arXiv:2402.09353).

    As there (section 4.3), no gradient passes through the rows' own norms. The norms are those of
    ``|w|² + 2 s w·(Aᵀ b) + s² bᵀ (A Aᵀ) b``: no matrix of the weight's size is made.
    """

    sharded_like: Mapping[str, int] = {**LowRankUpdate.sharded_like, "lora_magnitude": 0}
    reads_weight = True

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.lora_magnitude = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's product with the update. Under dropout the frozen product keeps its inputs whole, and what
        is trained of it does not, as in peft."""
        down, up = self.local(self.lora_A), self.local(self.lora_B)
        whole = (down, up)
        if self.residual:
            whole = torch.cat([down, self.local(self.lora_A0)]), torch.cat([up, -self.local(self.lora_B0)], 1)
        factor = self.local(self.lora_magnitude) / self._norms(weight, *whole)
        product, dropped = self.of_residual(hidden, product), self.dropout(hidden)
        low_rank = functional.linear(dropped, down)
        if dropped is hidden:
            return factor * _plus_scaled(product, low_rank, up, self.scaling)
        turned = (factor - 1) * self.of_residual(dropped, functional.linear(dropped, weight))
        return product + turned + factor * self.scaling * functional.linear(low_rank, up)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the 2-norms of the rows of the updated weight, [out]; never zero."""
        wide = _wide(weight)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * functional.linear(weight, down.to(weight.dtype))).sum(1)
        added = (scaled @ (down.to(wide) @ down.to(wide).t()) * scaled).sum(1)
        return _root(self.over_inputs(squares + crossed + added)).to(up.dtype)


class EmbeddingUpdate(Update):
    """Update of an embedding: rows of ``A`` [rows, rank], which starts at zero, times ``B`` [rank, width]."""

    sharded_like: Mapping[str, int] = {"lora_A": 0, "lora_B": 1}
    zero_initialised = "lora_A"
    """Name of the parameter that starts at zero."""
    inputs = 0

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rows, rank))
        self.lora_B = nn.Parameter(torch.empty(rank, width))
        self.scaling = scaling

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 [...] and ``product`` [..., width] to the latter's shape."""
        low_rank = functional.embedding(ids, self.local(self.lora_A))
        return _plus_scaled(product, low_rank, self.local(self.lora_B).t(), self.scaling)


class DoraEmbeddingUpdate(EmbeddingUpdate):
    """Update that also brings the columns of W + s A B to trained norms, as in peft; see :class:`DoraUpdate`."""

    sharded_like: Mapping[str, int] = {**EmbeddingUpdate.sharded_like, "lora_magnitude": 1}

    def __init__(self, rows: int, width: int, *, rank: int, scaling: float) -> None:
        super().__init__(rows, width, rank=rank, scaling=scaling)
        self.lora_magnitude = nn.Parameter(torch.empty(width))

    def forward(self, ids: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's embedding with the update, scaled by the magnitudes."""
        norms = self._norms(weight, self.local(self.lora_A), self.local(self.lora_B))
        return self.local(self.lora_magnitude) / norms * super().forward(ids, product, weight)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the 2-norms of the columns of the updated table, [width]; never zero."""
        wide = _wide(weight)
        squares = torch.linalg.vector_norm(weight, dim=0, dtype=wide).square()
        scaled = self.scaling * up.to(wide)
        crossed = 2 * (scaled * (down.to(weight.dtype).t() @ weight)).sum(0)
        added = (scaled * (down.to(wide).t() @ down.to(wide) @ scaled)).sum(0)
        return _root(self.over_inputs(squares + crossed + added)).to(up.dtype)


class ExpertsUpdate(Update):
    """Update of one matrix of experts [experts, out, in]: each expert has its own, from its own rows."""

    sharded_like: Mapping[str, int] = {"lora_A": 2, "lora_B": 1}
    zero_initialised = "lora_B"
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
        low_rank = grouped_linear(self.dropout(rows), self.local(self.lora_A), groups)
        return product + self.scaling * grouped_linear(low_rank, self.local(self.lora_B), groups)


def _wide(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums of squares of ``weight`` are computed."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _root(squares: torch.Tensor) -> torch.Tensor:
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def _plus_scaled(product: torch.Tensor, low_rank: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute ``product + scaling * low_rank @ upᵀ`` in one kernel, which makes no second tensor of that size."""
    flat = product.reshape(-1, product.shape[-1])
    return torch.addmm(flat, low_rank.reshape(-1, low_rank.shape[-1]), up.t(), alpha=scaling).view(product.shape)


def adapt(
    module: nn.Module, plan: ParallelPlan, config: LoraConfig
) -> tuple[ParallelPlan, list[InitRule], dict[str, nn.Module]]:
    """Freeze ``module`` and add updates, in place.

    Returns:
        The plan of the changed model, the rules that initialise the parameters that were added, and by path the layers
        that have an update.

    Raises:
        TargetNotFound: a name in the configuration matches no layer.
        TargetSavedWhole: a target trains whole already.
        LayerNotAdaptable: an option does not fit a layer.
    """
    # What trains whole: modules with parameters that end in one of the names, as in peft, or match its pattern.
    owners = [path for path, part in module.named_modules() if path and any(True for _ in part.parameters())]
    whole: list[str] = []
    for name in config.modules_to_save:
        whole += _meant(name, owners, "modules_to_save", "module", ending=True)
    # Layers with an update: those that the names mean, without those inside what trains whole, as in peft.
    candidates = adaptable(module)
    heads = [pattern for pattern, style in plan.tensor.items() if style in ("vocab_head", "score_head")]
    linear = [
        path
        for path, part in candidates.items()
        if not isinstance(part, nn.Embedding) and not matches_any(heads, path) and path != "lm_head"
    ]
    chosen: set[str] = set()
    for name in config.target_modules:
        meant = linear if name == ALL_LINEAR else _meant(name, candidates, "target_modules", "layer")
        left = [path for path in meant if not any(f"{path}.".startswith(f"{owner}.") for owner in whole)]
        if meant and not left:
            raise TargetSavedWhole(name=name, paths=meant)
        chosen |= set(left)
    targets = {path: part for path, part in candidates.items() if path in chosen}
    for key in ("rank_pattern", "alpha_pattern"):
        for name in getattr(config, key):
            if not any(ends_in(path, name) for path in targets):
                nearest = _nearest(name, [*targets])
                raise TargetNotFound(key=key, name=name, kind="layer with an update", candidates=nearest)
    module.requires_grad_(False)
    rules: list[InitRule] = []
    for path, layer in targets.items():
        _add_update(module, path, layer, config, rules)
    for path in whole:
        module.get_submodule(path).requires_grad_(True)
    if config.biases != "none":
        for path, part in module.named_modules():
            bias = getattr(part, "bias", None)
            if isinstance(bias, nn.Parameter) and (config.biases == "all" or path in targets):
                bias.requires_grad_(True)
    scales: dict[str, float] = {}  # of what LoRA+ lets learn at the rate of B
    if config.loraplus_lr_ratio != 1.0:
        tables = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, UpdatedEmbedding))
        for name, parameter in module.named_parameters():
            is_b = name.endswith(".lora_B") and not name.startswith(tables)
            if parameter.requires_grad and (parameter.ndim == 1 or is_b):
                scales[name] = config.loraplus_lr_ratio
    changed = replace(plan, no_weight_decay=(*plan.no_weight_decay, "*.lora_magnitude"), lr_scales=scales)
    return changed, rules, targets


def _add_update(module: nn.Module, path: str, layer: nn.Module, config: LoraConfig, rules: list[InitRule]) -> None:
    """Give the layer at ``path`` its update, and add the rules by which that starts to ``rules``; equal layers share
    them."""
    options: dict[str, Any] = {"rank": config.rank_of(path), "scaling": config.scaling_of(path)}
    dropout, residual = config.lora_dropout, config.init_lora_weights == "pissa"
    owner, _, matrix = path.rpartition(".")
    update: LowRankUpdate | EmbeddingUpdate | ExpertsUpdate
    if residual and not isinstance(layer, nn.Linear):
        layers = "an embedding" if isinstance(layer, nn.Embedding) else "a matrix of experts"
        raise LayerNotAdaptable(path=path, layer=layers, option="init_lora_weights: pissa", fits="linear layers")
    if isinstance(layer, nn.Linear):
        inputs, outputs = layer.in_features, layer.out_features
        make = DoraUpdate if config.use_dora else LowRankUpdate
        update = make(inputs, outputs, dropout=dropout, residual=residual, **options)
        module.set_submodule(path, UpdatedLinear(layer, update))
    elif isinstance(layer, nn.Embedding):
        make_table = DoraEmbeddingUpdate if config.use_dora else EmbeddingUpdate
        update = make_table(layer.num_embeddings, layer.embedding_dim, **options)
        module.set_submodule(path, UpdatedEmbedding(layer, update))
    else:
        assert isinstance(layer, SwiGLUExperts)
        if config.use_dora:
            raise LayerNotAdaptable(path=path, layer="a matrix of experts", option="use_dora")
        experts, outputs, inputs = getattr(layer, matrix).shape
        layer.updates[matrix] = update = ExpertsUpdate(experts, inputs, outputs, dropout=dropout, **options)
        path = f"{owner}.updates.{matrix}"
    if not isinstance(layer, SwiGLUExperts):
        path += ".update"
    if isinstance(layer, nn.Embedding):
        drawn = InitRule(pattern="lora_B", distribution="normal", std=1.0)
    elif config.init_lora_weights == "gaussian":
        drawn = InitRule(pattern="lora_A", distribution="normal", std=1 / options["rank"])
    else:  # as of a linear layer of torch (He et al. 2015 with a = sqrt 5)
        drawn = InitRule(pattern="lora_A", distribution="uniform", std=1 / math.sqrt(inputs))
    pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
    constants = {name: 0.0 for name, _ in update.named_parameters() if name != drawn.pattern}
    constants |= {"lora_magnitude": 1.0} if config.use_dora else {}
    shared = [
        replace(drawn, pattern=f"{pattern}.{drawn.pattern}"),
        *(
            InitRule(pattern=f"{pattern}.{name}", distribution="constant", mean=mean)
            for name, mean in constants.items()
        ),
    ]
    earlier = {rule.pattern: rule for rule in rules}
    if earlier.get(shared[0].pattern, shared[0]) != shared[0]:  # a layer of another size under the same pattern
        rules.insert(0, replace(drawn, pattern=f"{path}.{drawn.pattern}"))
    rules += [rule for rule in shared if rule.pattern not in earlier]


def adaptable(module: nn.Module) -> dict[str, nn.Module]:
    """Return what can get an update, in the order of the model: paths of linear layers, embeddings and experts'
    matrices, with the module that has the weight."""
    modules: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if isinstance(part, SwiGLUExperts):
            modules |= {f"{path}.{matrix}": part for matrix in _MATRICES}
        elif type(part).forward in (nn.Linear.forward, nn.Embedding.forward):
            modules[path] = part
    return modules


def adaptable_names(builder: ModelBuilder) -> set[str]:
    """Return the names of the matrices of the builder's model that can get an update."""
    with meta_device():
        modules = adaptable(builder.build())
    return {path if isinstance(part, SwiGLUExperts) else f"{path}.weight" for path, part in modules.items()}


def tables_of(builder: ModelBuilder) -> list[str]:
    """Return the names of the weights of the builder's model that are looked up row by row."""
    with meta_device():
        module = builder.build()
    return [f"{path}.weight" for path, part in module.named_modules() if isinstance(part, nn.Embedding)]


def _meant(name: str, candidates: Iterable[str], key: str, kind: str, *, ending: bool = False) -> list[str]:
    paths = list(candidates)
    matching = _matching(name, paths, ending)
    for separate in _SEPARATE.get(name, ()) if not matching else ():
        matching += _matching(separate, paths, ending)
    if not matching:
        raise TargetNotFound(key=key, name=name, kind=kind, candidates=_nearest(name, paths))
    return matching


def _matching(name: str, paths: Sequence[str], ending: bool) -> list[str]:
    """Return the paths that a pattern matches whole; of a name those that end in it, or (not ``ending``) have it among
    their components, or within one where it is not a component anywhere."""
    if any(sign in name for sign in "*?["):
        return [path for path in paths if fnmatch.fnmatchcase(path, name)]
    if ending:
        return [path for path in paths if path.endswith(name)]
    return [path for path in paths if f".{name}." in f".{path}."] or [path for path in paths if name in path]


def _nearest(name: str, paths: Sequence[str]) -> list[str]:
    leaves = list(dict.fromkeys(part for path in paths for part in path.split(".") if not part.isdigit()))
    last = name.rpartition(".")[2].strip("*?")
    return difflib.get_close_matches(last, leaves, n=3, cutoff=0.4) or leaves[:8]
