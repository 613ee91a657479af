"""Plan to shard, split into stages, recompute, regularise and initialise a plain ``torch.nn`` model: data, no code.

Paths are dotted module or parameter names relative to the model's root. In a pattern, ``*`` stands for any part of one
component, as in ``layers.*.attention.q_proj``; at the beginning it stands for any depth, as in ``*.bias`` and
``*norm.weight``. Patterns of initialisation rules and of ``model.optim.param_groups`` mean the same. Layer numbers are
global: also under pipeline parallelism ``layers.17`` is the eighteenth layer of the whole model.

An initial weight is a function of (seed, global parameter name, global element index) only, so that any shard of any
layout draws its own (:mod:`nxdt_core.models.random.init`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AttentionHeads", "ExpertPlan", "InitRule", "ParallelPlan", "PipelinePlan", "TensorStyle"]

TensorStyle = Literal[
    "column",
    "row",
    "column_gathered",
    "column_whole",
    "row_split",
    "row_partial",
    "heads",
    "channels",
    "vocab_embedding",
    "vocab_head",
    "score_head",
    "replicate",
]
"""Distribution of a module's weight over the tensor-parallel ranks.

``column``: output features sharded; ``row``: input features sharded, outputs summed; ``vocab_embedding``: an
embedding table sharded by vocabulary row; ``vocab_head``: the output projection sharded by vocabulary, feeding a
vocabulary-parallel loss. (Shoeybi et al. 2019, arXiv:1909.08053.) ``score_head``: an output projection to a few
scores, in no tensor block, whole on each rank; under sequence parallelism the scores of all tokens are gathered.
``column_gathered`` and ``row_split``: the same
cuts where the module between them needs all features on each rank, such as a norm over all heads: outputs of the one
are gathered, the other takes its part of whole inputs. ``column_whole``: as ``column_gathered``, as the end of a
tensor block: what follows is the same on each rank. ``row_partial``: as ``row`` without a bias and without the
sum, which the module that ends the block makes (one of ``experts.dispatchers``). ``heads``: every parameter and buffer
of the module has a leading dimension of query heads or of key or value heads (:class:`AttentionHeads` says which),
such as a norm with weights for each head or the slopes of ALiBi; each rank has the part for its heads. ``channels``:
the same for the output features of a ``column`` that is not of heads, such as a scale between two matrices. Buffers
of both are registered with ``persistent=False`` and computed in ``reset_buffers()``. ``replicate``: whole on each
rank and fed with what is whole on each rank, also where its path is in a tensor block (there it comes after a
``row``'s sum); an embedding table that looks up its own part of the sequence under sequence parallelism.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Split of the model into pipeline stages, which may begin before any entry of ``layers`` and nowhere else."""

    hidden_size: int
    """Width of the hidden states [batch, seq, hidden_size] that travel between stages."""
    first: tuple[str, ...] = ("embed_tokens",)
    """Modules that run before the layers and live on the first stage."""
    layers: str = "layers"
    """The ``torch.nn.ModuleDict`` of layers whose keys are global layer numbers."""
    last: tuple[str, ...] = ("norm", "lm_head")
    """Modules that run after the layers and live on the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Heads, which tensor parallelism shards as wholes (those of keys and values may be replicated instead)."""

    query_heads: int
    kv_heads: int
    query: tuple[str, ...] = ()
    """Module patterns of the ``column`` projections whose outputs are query heads, and of ``heads`` modules of them."""
    key_value: tuple[str, ...] = ()
    """Module patterns of key or value projections; replicated where tensor parallelism exceeds ``kv_heads``."""
    output: tuple[str, ...] = ()
    """The ``row`` projections whose inputs are query heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Modules and sharding of a mixture of experts. The whole mixture is a tensor block."""

    modules: tuple[str, ...] = ()
    """Modules whose parameters have a leading expert dimension, sharded over expert-parallel ranks; they read them
    through their attribute ``local`` (:class:`nxdt_core.models.moe.experts.SwiGLUExperts`)."""
    tensor: Mapping[str, Literal["column", "row"]] = field(default_factory=dict)
    """Parameter path pattern of experts' matrices [experts, out, in], and of their biases [experts, out] → which side
    tensor parallelism shards. Biases of a ``row`` are whole: each rank adds its share of them, by the attribute
    ``shares``."""
    dispatchers: tuple[str, ...] = ()
    """Modules that move tokens to experts and back and end the tensor block; expert parallelism replaces them."""
    pooled: int = 0
    """Experts of a router whose loss pools shares over all layers (``pooled`` of the router); 0: none does."""
    routers: tuple[str, ...] = ()
    """Modules that count the tokens of a micro-batch, which context parallelism divides and tensor parallelism repeats:
    engines fill their attribute ``shards`` (:class:`nxdt_core.models.moe.router.TokenShards`). Where they keep
    ``statistics`` of their number of ``experts`` (:class:`nxdt_core.models.moe.router.TopKRouter`), a step reports
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """All that an engine needs to know about a model in addition to its modules.

    The engine applies it in a fixed order: adapters, pipeline cut, tensor/sequence/expert/context, recompute,
    compile, data-parallel sharding, then initialisation. Patterns that match nothing are an error.
    """

    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    """Module path pattern → style. Modules that no pattern names are replicated."""
    tensor_blocks: tuple[str, ...] = ()
    """Modules inside which tensor parallelism happens: every ``column``, ``row`` and ``vocab_head`` is in one or is
    one. What goes in is the first positional argument, [batch, seq, hidden], whole inside (under sequence parallelism
    gathered there, once for all projections); a ``row`` ends it. Gradients inside are partial sums over the ranks. A
    ``column`` or ``row_split`` may be a block by itself, and so may a ``row``, which then takes the part of its inputs
    that such a column gave it. Norms and dropouts between the blocks run on shards of the sequence under sequence
    parallelism (Korthikanti et al. 2022, arXiv:2205.05198)."""
    heads: AttentionHeads | None = None
    pipeline: PipelinePlan | None = None
    attention_cores: tuple[str, ...] = ()
    """Modules with the call ``(query, key, value, document_ids)`` that context parallelism replaces; their
    ``semantics()`` says what they compute (:class:`nxdt_core.models.attention.grouped_query.AttentionSemantics`)."""
    experts: ExpertPlan = field(default_factory=ExpertPlan)
    """Plan of a mixture of experts."""
    recompute: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name usable in ``model.activations_checkpoint_recompute`` → module path patterns."""
    cheap: tuple[str, ...] = ()
    """Modules with a few operations per element, such as norms and activation functions: they take tensors by position
    and return one, draw no random numbers and have no state but parameters. Where ``recompute`` names them and they are
    in a layer, what reads their results does not keep them either."""
    recompute_layer: str = "layers.*"
    """Modules that ``activations_checkpoint_granularity: full`` recomputes, one checkpoint per match."""
    norms: tuple[str, ...] = ()
    """Parameter path patterns of normalisation scales; decayed only where the configuration says
    ``do_layer_norm_weight_decay: true``."""
    no_weight_decay: tuple[str, ...] = ("*.bias",)
    """Parameter path patterns that never take weight decay."""
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    """Parameter path → factor on its peak learning rate, where ``model.optim.param_groups`` sets none; of adapters."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of parameters that are one: (owner, user), such as ``("embed_tokens.weight", "lm_head.weight")``."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Mesh dimension (``tp``, ``pp``, ``ep``, ``cp``) → why the model cannot be laid out along it, as the rest of a
    sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Distribution of the parameters whose path matches ``pattern``; the first match of a list wins."""

    pattern: str
    """Path pattern as in :class:`nxdt_core.protocols.plan.ParallelPlan`; ``*`` alone matches all. One that matches no
    parameter is an error, except ``*.bias``."""
    distribution: Literal["normal", "truncated_normal", "uniform", "constant"]
    mean: float = 0.0
    std: float = 0.02
    """Standard deviation before truncation; half the width for ``uniform``; unused for ``constant``."""
    truncate_at: float = 3.0
    """Cut of ``truncated_normal``, in standard deviations on each side."""
