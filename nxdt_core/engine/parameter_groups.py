"""Parameter groups of an optimizer, by the decay rules of a plan and ``model.optim.param_groups``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from nxdt_core.config.schema import ParamGroupConfig
from nxdt_core.errors.optimizers import ParameterGroupEmpty
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["check_overrides", "override_of", "parameter_groups"]


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
        plan: its ``no_weight_decay`` patterns are never decayed, its ``norms`` only with ``decay_norms``.
        lr: peak learning rate.
        weight_decay: of parameters that decay.
        decay_norms: ``model.do_layer_norm_weight_decay``.
        overrides: ``model.optim.param_groups``; see :func:`override_of`. What they say of decay counts for all
            parameters that they choose.
    """
    exempt = plan.no_weight_decay if decay_norms else (*plan.no_weight_decay, *plan.norms)
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            override = override_of(overrides, name)
            rate, decay = lr, 0.0 if matches_any(exempt, name) else weight_decay
            if override is not None:
                rate = rate if override.lr is None else override.lr
                decay = decay if override.weight_decay is None else override.weight_decay
            group = groups.setdefault((rate, decay), ParameterGroup(params=[], names=[], lr=rate, weight_decay=decay))
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


def override_of(overrides: Sequence[ParamGroupConfig], name: str) -> ParamGroupConfig | None:
    """Return the last of ``model.optim.param_groups`` whose pattern matches a parameter."""
    return next((override for override in reversed(overrides) if matches(override.params, name)), None)


def check_overrides(overrides: Sequence[ParamGroupConfig], names: Iterable[str], ranks: RankAgreement) -> None:
    """Check that each of ``overrides`` chooses a parameter on some rank. Collective where there are any.

    Args:
        overrides: ``model.optim.param_groups``.
        names: global names of the parameters that this rank trains.
        ranks: of the run.

    Raises:
        ParameterGroupEmpty: the pattern of one matches none.
    """
    if not overrides:
        return
    everywhere = sorted({name for each in ranks.all_gather_object([*names]) for name in each})
    used = [override_of(overrides, name) for name in everywhere]
    empty = [override.params for override in overrides if not any(override is each for each in used)]
    if empty:
        raise ParameterGroupEmpty(patterns=empty, names=everywhere)
