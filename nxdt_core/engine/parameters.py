"""Parameters of a rank: their global names, shards and replicas, and their groups in the optimizer.

Groups follow from the decay rules of a plan and from ``model.optim.param_groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.config.schema import ParamGroupConfig
from nxdt_core.distributed.placement import is_dtensor, local_shard_of, sharded_over
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.engine.tensor.layers import PaddedDim, unpadded_shard
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import ParameterGroupEmpty
from nxdt_core.models.patterns import matches_any, matches_within, styled
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.tensor_shards import LocalShard


class StageParameters:
    """The parameters of a rank's stages by global name.

    A pair that is tied is one parameter where both are on one stage. In a pipeline each end has a copy: the rank of
    the last stage keeps its copy under the owner's name, as every other rank keeps the owner. A rank with both ends
    (``zbv``) keeps the owner alone, and its ``tied_pairs`` follow it.
    """

    def __init__(self, modules: Sequence[nn.Module], tied: Sequence[tuple[str, str]], mesh: ParallelMesh) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        """Global name → what the optimizer trains and checkpoints hold."""
        self.owned: list[nn.Parameter] = []
        """Parameters whose elements this rank counts in sums over all ranks: it is the first of those of its pipeline
        stage that hold the very same elements, and has the owner of a tied pair."""
        self.tied_pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        """(owner, user) that are two tensors on this rank."""
        parameters = {name: p for module in modules for name, p in module.named_parameters(remove_duplicate=False)}
        owner_of, copies = {user: owner for owner, user in tied}, set[str]()
        for name, parameter in parameters.items():
            owner = owner_of.get(name)
            if owner is None:
                self.by_name[name] = parameter
            elif owner not in parameters:
                self.by_name[owner] = parameter
                copies.add(owner)
            elif parameters[owner] is not parameter:
                self.tied_pairs.append((parameters[owner], parameter))
        for name, parameter in self.by_name.items():
            cut = sharded_over(parameter)
            tensor_dim: Dimension = "tp_kv_replica" if "tp_kv" in cut else "tp"
            data_dim: Dimension = "efsdp" if "ep" in cut else "fsdp"
            replicas: tuple[Dimension, ...] = ("dp_replicate", data_dim, tensor_dim)
            if name not in copies and not any(mesh.rank(dim) for dim in replicas if dim not in cut):
                self.owned.append(parameter)


def shard_of(parameter: nn.Parameter, padded: PaddedDim | None, *, matrix: bool) -> ParameterShard:
    """Return the shard that this rank holds.

    Args:
        parameter: DTensor where it is cut.
        padded: the dimension that has zeros, which no optimizer counts; None where it has none.
        matrix: whether it is one of a hidden layer.
    """
    shard = local_shard_of(parameter) if padded is None else unpadded_shard(parameter, padded)
    groups: tuple[dist.ProcessGroup, ...] = ()
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        groups = tuple(
            mesh.get_group(dim)
            for dim, placement in enumerate(parameter.placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        )
    return ParameterShard(
        shape=shard.shape, region=shard.region, groups=groups, matrix=matrix and len(shard.shape) >= 2
    )


def tables(modules: Iterable[nn.Module], plan: ParallelPlan) -> frozenset[str]:
    """Return the names of embeddings and output heads: matrices whose rows are looked up or are classes, one by one."""
    vocabulary = styled(plan, "vocab_embedding", "vocab_head", "score_head")
    names: set[str] = set()
    for module in modules:
        for path, part in module.named_modules():
            if isinstance(part, nn.Embedding) or matches_any(vocabulary, path):
                names |= {f"{path}.{leaf}" if path else leaf for leaf, _ in part.named_parameters(recurse=False)}
    return frozenset(names | {owner for owner, user in plan.tied if user in names})


class Replicas:
    """See :class:`nxdt_core.protocols.parallel_model.Replicas`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.reads = dist.get_rank(group) == 0

    @torch.no_grad()
    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the elements of the one that reads, in place. Collective."""
        for tensor in tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, group=self._group, group_src=0)
            if dense is not tensor and not self.reads:
                tensor.copy_(dense)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    plan: ParallelPlan,
    *,
    lr: float,
    weight_decay: float,
    decay_norms: bool,
    overrides: Sequence[ParamGroupConfig] = (),
) -> list[ParameterGroup]:
    """Split the trainable parameters by learning rate and weight decay, in the order of their first parameters.

    Args:
        parameters: (global name, parameter) pairs.
        plan: its ``no_weight_decay`` patterns are never decayed, its ``norms`` only with ``decay_norms``; its
            ``lr_scales`` are factors on ``lr``.
        lr: peak learning rate.
        weight_decay: factor for parameters that decay.
        decay_norms: ``model.do_layer_norm_weight_decay``.
        overrides: ``model.optim.param_groups``; see :func:`override_of`. What they say of decay counts for all
            parameters that they choose.
    """
    exempt = plan.no_weight_decay if decay_norms else (*plan.no_weight_decay, *plan.norms)
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            override = override_of(overrides, name) if overrides else None
            rate, decay = lr * plan.lr_scales.get(name, 1.0), 0.0 if matches_any(exempt, name) else weight_decay
            if override is not None:
                rate = (rate if override.lr is None else override.lr) * override.lr_scale
                decay = decay if override.weight_decay is None else override.weight_decay
            group = groups.setdefault((rate, decay), ParameterGroup(params=[], names=[], lr=rate, weight_decay=decay))
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


def check_loadable(
    own: Mapping[str, torch.Tensor | LocalShard], state: Mapping[str, torch.Tensor | LocalShard], *, strict: bool
) -> None:
    """Check that ``state`` can be copied into ``own``.

    Raises:
        WeightsDoNotFit: names or shapes differ (with ``strict=False``: shapes only).
    """
    shapes = [
        f"{name}: {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and tuple(state[name].shape) != tuple(own[name].shape)
    ]
    missing = [name for name in own if name not in state] if strict else []
    extra = [name for name in state if name not in own] if strict else []
    if shapes or missing or extra:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)


def override_of(overrides: Sequence[ParamGroupConfig], name: str) -> ParamGroupConfig | None:
    """Return the last of ``model.optim.param_groups`` whose pattern matches a parameter."""
    return next((override for override in reversed(overrides) if matches_within(override.params, name)), None)


def check_overrides(overrides: Sequence[ParamGroupConfig], names: Iterable[str], ranks: RankAgreement) -> None:
    """Check that each of ``overrides`` chooses a parameter on some rank. Collective where there are any.

    Args:
        overrides: ``model.optim.param_groups``.
        names: global names of the parameters that this rank trains.
        ranks: all processes, whose names are gathered.

    Raises:
        ParameterGroupEmpty: the pattern of one matches none.
    """
    if not overrides:
        return
    everywhere = sorted({name for item in ranks.all_gather_object([*names]) for name in item})
    used = [override_of(overrides, name) for name in everywhere]
    empty = [override.params for override in overrides if not any(override is item for item in used)]
    if empty:
        raise ParameterGroupEmpty(patterns=empty, names=everywhere)
