"""State of the optimizer, under ZeRO-1 cut over the data-parallel ranks, as families of tensors by parameter.

ZeRO-1 (torch-xla's ``ZeroRedundancyOptimizer``) cuts each tensor-parallel shard along its first dimension, padded to a
multiple of the ranks, and numbers parameters through the optimizer's groups; names are not in the files. NxD Training
makes two groups, with and without weight decay, each in the order of the model's own file. Which number means which
parameter follows from that, is checked by every shape, and where fp32 master weights were saved by comparing these with
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    first, step = ranks[0][0]
    if any(kinds.keys() != first.keys() for stage in ranks for kinds, _ in stage):
        raise Unmergeable("the ranks hold different kinds of state")
    return OptimizerState(
        {kind: [[rank[0][kind] for rank in stage] for stage in ranks] for kind in sorted(first)}, step
    )


def _rank(
    layout: NeuronxLayout, tp: int, pp: int, weights: Mapping[str, LazyTensor]
) -> tuple[dict[str, dict[str, LazyTensor]], float | None]:
    """Return the families of a tensor-parallel rank's state, and the step."""
    paths = [layout.optimizer_file(dp, tp, pp) for dp in range(layout.optimizer_dp)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise Unmergeable(f"optim/{missing[0]} is missing")
    files = [RankFile(path) for path in paths]
    shards = [(file, _table(file.content.get("base_state") or file.content.get("state"))) for file in files]

    # The parameter of each number.
    parameters, groups = list(parameters_of(weights)), files[0].content.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Unmergeable("it has no param_groups")
    sizes = [len(group.get("params", ())) for group in groups]
    orders = [parameters] if len(sizes) == 1 and sizes[0] == len(parameters) else []
    for parts in _WITHOUT_DECAY:
        exempt = [name for name in parameters if any(part in name for part in parts)]
        decayed = [name for name in parameters if not any(part in name for part in parts)]
        orders += [decayed + exempt] if sizes == [len(decayed), len(exempt)] else []
    if not orders:
        raise Unmergeable(f"its groups have {sizes} parameters, and which these are of {len(parameters)} is not known")
    names = orders[0]

    families: dict[str, dict[str, LazyTensor]] = {}
    step: float | None = None
    for number, name in enumerate(names):
        state = _table(shards[0][1].get(number))  # none of a parameter that has had no gradient
        for kind in state:
            states = [(file, _table(state.get(number))) for file, state in shards]
            shares = [(file, state[kind]) for file, state in states if kind in state]
            if kind == "step":
                file, value = shares[0]
                step = float(file.leaf("step", value).read()) if file.is_tensor(value) else float(str(value))
            elif files[0].is_tensor(state[kind]):
                families.setdefault(str(kind), {})[name] = _whole(str(kind), name, shares, weights[name], len(files))
    masters = [(file, _table(file.content.get("sharded_master_weights"))) for file in files]
    for number, name in enumerate(names if any(table for _, table in masters) else ()):
        shares, weight = [(file, table[number]) for file, table in masters if number in table], weights[name]
        families.setdefault(MASTER, {})[name] = _whole(MASTER, name, shares, weight, len(files))
        if weight.stored and weight.shape:  # the beginning of the first share is that of the parameter
            share, whole = files[0].leaf(name, shares[0][1]).read().flatten()[:_COMPARED], weight.read().flatten()
            if not torch.allclose(share.float(), whole[: len(share)].float(), rtol=_ROUNDING, atol=1e-30):
                raise Unmergeable(f"its master weights of '{name}' are not those of the model")
    incomplete = [kind for kind, leaves in families.items() if len(leaves) != len(names)]
    if incomplete:
        raise Unmergeable(f"some parameters have no {incomplete[0]}")
    if not families:
        raise Unmergeable("it holds no state of parameters")
    return families, step


def _table(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _whole(kind: str, name: str, parts: Sequence[tuple[RankFile, Any]], weight: LazyTensor, files: int) -> LazyTensor:
    leaves = [file.leaf(name, value) for file, value in parts]
    rows = sum(leaf.shape[0] if leaf.shape else 1 for leaf in leaves)
    count = weight.shape[0] if weight.shape else 1
    rest = any(leaf.shape[1:] != weight.shape[1:] for leaf in leaves)
    if len(leaves) != files or rest or not 0 <= rows - count < files:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        defect = " (NxD Training saves those of one data-parallel rank only, unless wrap_with_zero is set)"
        raise Unmergeable(
            f"the shares {shapes} of the {kind} of '{name}' do not make up {weight.shape}{defect * (rows < count)}"
        )
    whole = concatenated(leaves, 0) if leaves[0].shape else leaves[0]
    return replace(whole.rows(0, count, name), shape=weight.shape) if whole.shape else whole
