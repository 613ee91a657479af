"""Tensors of one rank under Hugging Face's names, still cut: adapters added, Megatron's names and experts translated.

Megatron's models keep the rows of one head adjacent, its query, key and value in that order (``models/megatron`` of NxD
Training: ``[heads, 3 · size]``). Projections in this order are renamed to ``qkv_by_head`` and ``kv_by_head``. NxD's
experts are stacked, [experts, in, out]. Here each has a name, and its matrix is [out, in].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from nxdt_core.protocols.model import KeyMap
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor
from nxdt_plugin_migrate.errors import NeuronxReplicasDiffer

Stages = Sequence[Sequence[Mapping[str, LazyTensor]]]
"""Tensors by pipeline stage, tensor-parallel rank and name."""

MEGATRON = "language_model."
"""Prefix of the names of a model of ``model_source: megatron``."""

_NAMES = {
    f"{MEGATRON}embedding.word_embeddings.": "model.embed_tokens.",
    f"{MEGATRON}embedding.position_embeddings.": "model.embed_positions.",
    f"{MEGATRON}encoder.final_layernorm.": "model.norm.",
    f"{MEGATRON}encoder.": "model.",
    f"{MEGATRON}output_layer.": "lm_head.",
    ".self_attention.query_key_value.": ".self_attn.qkv_by_head.",
    ".self_attention.key_value.": ".self_attn.kv_by_head.",
    ".self_attention.query.": ".self_attn.q_proj.",
    ".self_attention.dense.": ".self_attn.o_proj.",
    ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
    ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    ".mlp.moe.": ".mlp.",
    ".mlp.router.linear_router.": ".block_sparse_moe.gate.",
}
_EXPERTS = re.compile(r"(.*)\.mlp\.expert_mlps\.mlp_op\.(gate_up_proj|down_proj)\.weight")
_ONE_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)_proj\.weight")
_MOST_EXPERTS = 4096
"""An empty tensor may claim any number of them."""
_HF_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}

GPT_KEYS = tuple(
    KeyMap(name=f"{ours}.{kind}", hf_names=(f"{theirs}.{kind}",))
    for ours, theirs in {
        "embedding.tokens": "model.embed_tokens",
        "embedding.positions": "model.embed_positions",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        **{f"layers.*.attention.{name}_proj": f"model.layers.*.self_attn.{name}_proj" for name in ("qkv", *"qkvo")},
        **{f"layers.*.mlp.{name}_proj": f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")},
        "norm": "model.norm",
        "lm_head": "lm_head",
    }.items()
    for kind in ("weight", "bias")
)
"""Parameters of the model ``gpt``, whose forms Hugging Face mostly lacks, by the names of :func:`renamed`."""


def renamed(rank: Mapping[str, LazyTensor], model_names: Iterable[str]) -> dict[str, LazyTensor]:
    """Return the tensors of a rank by Hugging Face's names; ``model_names`` show whether blocks are gated."""
    gated = any(name.endswith(("mlp.gate_proj.weight", ".w1.weight")) for name in model_names)
    tensors: dict[str, LazyTensor] = {}
    for name, leaf in rank.items():
        for theirs, ours in _NAMES.items():
            if theirs in name:
                name = name.replace(theirs, ours if gated or "gate" not in ours else ".mlp.up_proj.")
        tensors |= unstacked(name, leaf)
    return tensors


def unstacked(name: str, leaf: LazyTensor, first: int = 0) -> dict[str, LazyTensor]:
    """Return the matrices of experts, from the number ``first`` on, by name; any other tensor as it is.

    Raises:
        NeuronxMisfit: the experts are not stacked.
    """
    match = _EXPERTS.fullmatch(name.replace(".mlp.moe.", ".mlp."))
    if match is None:
        return {name: replace(leaf, name=name)}
    if len(leaf.shape) != 3 or leaf.shape[0] > _MOST_EXPERTS:
        raise leaf.misfit(f"a stack has 3 dimensions and at most {_MOST_EXPERTS} experts, not the shape {leaf.shape}")
    count, inner, outer = leaf.shape
    stem = f"{match[1].replace(f'{MEGATRON}encoder', 'model')}.block_sparse_moe.experts"
    names = [f"{stem}.{first + at}.{match[2]}.weight" for at in range(count)]

    def matrix(at: int) -> LazyTensor:
        return leaf.changed(lambda stack: stack[at].t(), (outer, inner))

    return {matrix_name: replace(matrix(at), name=matrix_name) for at, matrix_name in enumerate(names)}


def hf_name(name: str) -> str:
    """Return Mixtral's name of a matrix of an expert; any other name as it is."""
    match = _ONE_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{_HF_EXPERT[match[2]]}.weight"


def expert_ranks_joined(ranks: Sequence[Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """Return the tensors of all expert-parallel ranks of one tensor-parallel rank: experts numbered, others once.

    With ``save_xser``, only the first rank stores what is not of experts; the others refer to nothing.
    """
    copies: dict[str, list[LazyTensor]] = {}
    for at, rank in enumerate(ranks):
        for name, leaf in rank.items():
            count = leaf.shape[0] if leaf.shape else 0
            for tensor_name, tensor in unstacked(name, leaf, at * count).items():
                copies.setdefault(tensor_name, []).append(tensor)
    stored = {name: [leaf for leaf in leaves if leaf.stored] or leaves for name, leaves in copies.items()}
    return {name: equal(leaves) for name, leaves in stored.items()}


def equal(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return one of the parts, which is compared with the others when it is read.

    Raises:
        NeuronxMisfit: they have different shapes.
    """
    first = parts[0]
    other = next((part for part in parts if (part.shape, part.dtype) != (first.shape, first.dtype)), None)
    if other is not None:
        raise first.misfit(f"its copies have different shapes: {first.shape}, and {other.shape} in '{other.where}'")

    def compared() -> torch.Tensor:
        tensor = first.read()
        for part in parts[1:]:
            if not torch.equal(tensor, part.read()):
                raise NeuronxReplicasDiffer(tensor=first.name, path=part.where)
        return tensor

    return replace(first, read=compared, stored=all(part.stored for part in parts))


def is_adapted(name: str) -> bool:
    """Return whether a tensor is of an adapter, or of a layer that has one."""
    return ".lora_" in name or ".base_layer." in name


def adapted(
    stage: Sequence[Mapping[str, LazyTensor]], scaling: float | None, *, alone: bool
) -> list[dict[str, LazyTensor]]:
    """Return the tensors of the ranks of a stage with the updates of their adapter added, in the wider dtype.

    A layer ``X`` that has an adapter is saved as ``X.base_layer``, ``X.lora_A`` and ``X.lora_B``. Where tensor
    parallelism shards one of the two, the product of a rank's parts is its part of the update. An adapter ``alone`` is
    saved without layers, and the updates are returned. With ``merge_sharded_lora``, each rank saves all parts of it.

    Raises:
        NeuronxMisfit: an adapter without its scaling, or of a layer that is not linear.
    """
    first = stage[0]
    if alone and all(
        rank.keys() == first.keys() and all(torch.equal(leaf.read(), rank[name].read()) for name, leaf in first.items())
        for rank in stage[1:]
    ):
        parts: list[dict[str, LazyTensor]] = []
        for at, rank in enumerate(stage):
            parts.append(dict(rank))
            for name, leaf in rank.items():
                row = name.partition(".lora_")[0].endswith(("o_proj", "down_proj"))
                if len(leaf.shape) == 2 and row == (".lora_A." in name):
                    rows, columns = (size // len(stage) for size in leaf.shape)
                    columns_of_rank = partial(torch.narrow, dim=1, start=at * columns, length=columns)
                    part = leaf.changed(columns_of_rank, (leaf.shape[0], columns))
                    parts[-1][name] = part if row else leaf.rows(at * rows, rows, name)
        stage = parts
    results = []
    for rank in stage:
        tensors, used = {}, set()
        for name, leaf in rank.items():
            path, base, kind = name.partition(".lora_B." if alone else ".base_layer.")
            a, b = f"{path}.lora_A.weight", f"{path}.lora_B.{kind}"
            if base and a in rank and b in rank:
                used |= {a, b}
                under = leaf
                if alone:
                    shape, dtype = (*rank[b].shape[:1], *rank[a].shape[1:]), rank[b].dtype
                    zeros = partial(torch.zeros, shape, dtype=dtype)
                    under = replace(rank[b], name=f"{path}.{kind}", shape=shape, read=zeros)
                tensors[f"{path}.{kind}"] = _updated(under, rank[a], rank[b], scaling)
            else:
                tensors[f"{path}.{kind}" if base else name] = leaf
        left = next((leaf for name, leaf in tensors.items() if ".lora_" in name and name not in used), None)
        if left is not None:
            raise left.misfit(
                "it is of an adapter, and the weights of its layer are not there or not those of a projection"
            )
        results.append({name: leaf for name, leaf in tensors.items() if name not in used})
    return results


def _updated(leaf: LazyTensor, a: LazyTensor, b: LazyTensor, scaling: float | None) -> LazyTensor:
    if scaling is None:
        raise a.misfit("neither its file nor an adapter_config.json in the directory says what scales the adapter")
    if a.shape[:1] != b.shape[1:] or (*b.shape[:1], *a.shape[1:]) != leaf.shape:
        raise a.misfit(f"matrices of the shapes {b.shape} and {a.shape} do not update one of {leaf.shape}")
    dtype = torch.promote_types(leaf.dtype, torch.promote_types(a.dtype, b.dtype))

    def read() -> torch.Tensor:
        return leaf.read().to(dtype) + b.read().to(dtype) @ a.read().to(dtype) * scaling

    return replace(leaf, dtype=dtype, read=read, stored=leaf.stored and a.stored and b.stored)


def scaling_of(config: object) -> float | None:
    """Return what ``lora_config`` of a file, or ``adapter_config.json``, multiplies updates with; None if it does not
    say it."""
    if not isinstance(config, dict):
        return None
    alpha, rank = config.get("lora_alpha"), config.get("lora_rank")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        return None
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
