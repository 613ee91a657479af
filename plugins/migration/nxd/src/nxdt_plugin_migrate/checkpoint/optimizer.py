"""State of the optimizer, under ZeRO-1 cut over the data-parallel ranks, as families of tensors by parameter.

ZeRO-1 (torch-xla's ``ZeroRedundancyOptimizer``) cuts each tensor-parallel shard along its first dimension, padded to a
multiple of the ranks, and numbers parameters through the optimizer's groups; names are not in the files. NxD Training
makes two groups, with and without weight decay, each in the order of the model's own file. Which number means which
parameter follows from that, is checked by every shape, and where fp32 master weights were saved by comparing these with
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nxdt_plugin_migrate.checkpoint.layout import NeuronxLayout
from nxdt_plugin_migrate.checkpoint.merge import parameters_of
from nxdt_plugin_migrate.checkpoint.rank_tensors import Stages
from nxdt_plugin_migrate.checkpoint.unpickle import LazyTensor, RankFile, concatenated

MASTER = "master"
"""The family of fp32 master weights."""
_WITHOUT_DECAY = (("bias", "LayerNorm", "norm"), ("bias",))
"""Parts of the names of parameters that NxD Training exempts from weight decay, by ``do_layer_norm_weight_decay``."""
_COMPARED = 1024
"""Elements of each shard of master weights that are compared with the weights."""
_ROUNDING = 2.0**-7
"""A bfloat16 differs from the float32 that it was rounded from by less, relatively, also when rounded at random."""


class Unmergeable(Exception):
    """State cannot be merged, for the reason given; the weights can be imported without it."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Families of tensors that are cut as the weights are."""

    families: Mapping[str, Stages]
    """``exp_avg``, ``exp_avg_sq`` and :data:`MASTER`, as far as they were saved."""
    step: float | None


@dataclass(slots=True)
class _Rank:
    families: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    step: float | None = None


def read_optimizer(layout: NeuronxLayout, weights: Stages) -> OptimizerState | None:
    """Return the optimizer's state for ``weights``, or None for a model that NxD's converter wrote.

    Raises:
        Unmergeable: a run saved it, and it is missing, not complete, or ambiguous.
        PickleRefused, NeuronxFileDamaged: a file of it cannot be read.
    """
    if layout.ep > 1:
        raise Unmergeable("expert-parallel ranks saved it")
    if layout.older:
        if any(layout.directory.glob("optim*")):
            raise Unmergeable("the functions before NxD's save_checkpoint wrote it")
        return None
    if not layout.optimizer_dp and layout.of_run:
        raise Unmergeable("a run saved it, but optim/ has no dp_rank_…_tp_rank_…_pp_rank_….pt")
    if not layout.optimizer_dp:
        return None
    ranks = [[_rank(layout, tp, pp, weights[pp][tp]) for tp in range(layout.tp)] for pp in range(layout.pp)]
    every = [rank for stage in ranks for rank in stage]
    names = set(every[0].families)
    if any(set(rank.families) != names for rank in every):
        raise Unmergeable("the ranks hold different kinds of state")
    families = {name: [[rank.families[name] for rank in stage] for stage in ranks] for name in sorted(names)}
    return OptimizerState(families, every[0].step)


def _rank(layout: NeuronxLayout, tp: int, pp: int, weights: Mapping[str, LazyTensor]) -> _Rank:
    paths = [layout.optimizer_file(dp, tp, pp) for dp in range(layout.optimizer_dp)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise Unmergeable(f"optim/{missing[0]} is missing")
    files = [RankFile(path) for path in paths]
    first = files[0].content
    shards = [(file, _table(file.content.get("base_state") or file.content.get("state"))) for file in files]
    names = _names(first, list(parameters_of(weights)))
    rank = _Rank()
    for number, name in enumerate(names):
        own = _table(shards[0][1].get(number))  # none of a parameter that has had no gradient
        for kind in own:
            states = [(file, _table(state.get(number))) for file, state in shards]
            parts = [(file, state[kind]) for file, state in states if kind in state]
            if kind == "step":
                rank.step = _number(*parts[0])
            elif files[0].is_tensor(own[kind]):
                _put(rank, str(kind), name, parts, weights[name], len(files))
    masters = [(file, _table(file.content.get("sharded_master_weights"))) for file in files]
    for number, name in enumerate(names if any(shares for _, shares in masters) else ()):
        parts = [(file, shares[number]) for file, shares in masters if number in shares]
        _put(rank, MASTER, name, parts, weights[name], len(files))
        _compare(files[0].leaf(name, parts[0][1]), weights[name])
    incomplete = [kind for kind, leaves in rank.families.items() if len(leaves) != len(names)]
    if incomplete:
        raise Unmergeable(f"some parameters have no {incomplete[0]}")
    if not rank.families:
        raise Unmergeable("it holds no state of parameters")
    return rank


def _names(content: Mapping[str, Any], parameters: list[str]) -> list[str]:
    """The parameter of each number."""
    groups = content.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise Unmergeable("it has no param_groups")
    sizes = [len(each.get("params", ())) for each in groups]
    if len(sizes) == 1 and sizes[0] == len(parameters):
        return parameters
    for parts in _WITHOUT_DECAY:
        exempt = [name for name in parameters if any(part in name for part in parts)]
        decayed = [name for name in parameters if not any(part in name for part in parts)]
        if sizes == [len(decayed), len(exempt)]:
            return decayed + exempt
    raise Unmergeable(f"its groups have {sizes} parameters, and which these are of {len(parameters)} is not known")


def _table(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _put(
    rank: _Rank, kind: str, name: str, parts: Sequence[tuple[RankFile, Any]], weight: LazyTensor, files: int
) -> None:
    leaves = [file.leaf(name, value) for file, value in parts]
    rows = sum(leaf.shape[0] if leaf.shape else 1 for leaf in leaves)
    wanted = weight.shape[0] if weight.shape else 1
    rest = any(leaf.shape[1:] != weight.shape[1:] for leaf in leaves)
    if len(leaves) != files or rest or not 0 <= rows - wanted < files:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        defect = " (NxD Training saves those of one data-parallel rank only, unless wrap_with_zero is set)"
        raise Unmergeable(
            f"the shares {shapes} of the {kind} of '{name}' do not make up {weight.shape}{defect * (rows < wanted)}"
        )
    whole = concatenated(leaves, 0) if leaves[0].shape else leaves[0]
    exact = replace(whole.rows(0, wanted, name), shape=weight.shape) if whole.shape else whole
    rank.families.setdefault(kind, {})[name] = exact


def _number(file: RankFile, value: object) -> float:
    return float(file.leaf("step", value).read()) if file.is_tensor(value) else float(str(value))


def _compare(master: LazyTensor, weight: LazyTensor) -> None:
    """See that the beginning of the first share of master weights is that of the parameter that it is taken for."""
    if weight.stored and weight.shape:
        share, whole = master.read().flatten()[:_COMPARED], weight.read().flatten()
        if not torch.allclose(share.float(), whole[: len(share)].float(), rtol=_ROUNDING, atol=1e-30):
            raise Unmergeable(f"its master weights of '{weight.name}' are not those of the model")
