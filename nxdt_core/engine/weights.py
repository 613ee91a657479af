"""A model built on the meta device, and memory and first values for a rank that holds a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nxdt_core.distributed.devices import meta_device
from nxdt_core.engine.data.fsdp import product_weights
from nxdt_core.engine.precision import quantise_frozen
from nxdt_core.errors.models import BuffersNotReset, InitRulesWrong
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import BaseDtype, QuantisedWeight
from nxdt_core.models.random.init import complete_init_rules, fill, rule_for
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.tensor_shards import LocalShard

_BIASES = ParallelPlan().no_weight_decay
"""Patterns that need not match: not every model has biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A model built by a builder and changed by adapters, with its plan and rules."""

    module: nn.Module
    """Model on the meta device."""
    plan: ParallelPlan
    """Includes the changes of adapters."""
    rules: tuple[InitRule, ...]
    """Rules of the initial weights, those of adapters first."""
    added: frozenset[str]
    """Parameters that adapters added."""


def build_whole(builder: ModelBuilder, adapters: Sequence[Adapter] = ()) -> WholeModel:
    """Build a model on the meta device and adapt it.

    Raises:
        InitRulesWrong: a rule matches no parameter, or a norm is drawn.
    """
    with meta_device():
        module, plan = builder.build(), builder.plan()
        base = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        names = base
        rules = complete_init_rules(builder, base)
        check_rules(rules, base, norms=plan.norms, of=type(builder).__name__)
        for adapter in adapters:
            plan, adapter_rules = adapter.apply(module, plan), tuple(adapter.init_rules())
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            check_rules(adapter_rules, names, of=type(adapter).__name__)
            rules = (*adapter_rules, *rules)
    return WholeModel(module=module, plan=plan, rules=rules, added=frozenset(names) - {*base})


def set_dtypes(whole: nn.Module, plan: ParallelPlan, precision: PrecisionPolicy) -> None:
    """Masters are what is stored of trained parameters; a frozen one is stored as it is computed with, which under
    autocast is the dtype of products for a weight that nothing else reads."""
    compute = getattr(torch, precision.parameters)
    whole.to(torch.float32 if precision.master_weights else compute)
    product = getattr(torch, precision.autocast or precision.parameters)
    multiplied: frozenset[str] | None = None
    for name, parameter in whole.named_parameters():
        if not parameter.requires_grad:
            multiplied = product_weights(whole, plan) if multiplied is None else multiplied
            parameter.data = parameter.data.to(product if name in multiplied else compute)


def quantised_weights(
    builder: ModelBuilder, adapters: Sequence[Adapter], precision: PrecisionPolicy, dtype: BaseDtype
) -> dict[str, QuantisedWeight]:
    """Return the frozen weights that one process would quantise, by name, on the meta device."""
    built = build_whole(builder, adapters)
    set_dtypes(built.module, built.plan, precision)
    quantise_frozen(built.module, built.plan, dtype)
    return {name: p for name, p in built.module.named_parameters() if isinstance(p, QuantisedWeight)}


def check_rules(rules: Sequence[InitRule], names: Sequence[str], *, norms: Sequence[str] = (), of: str) -> None:
    """Check that each rule is for a parameter, and that norms start constant.

    Args:
        rules: initialisation rules of a builder or an adapter.
        names: global names of all parameters of the model.
        norms: patterns of the scales of norms; none where they are not the subject of ``rules``.
        of: class that gives the rules, for the message.

    Raises:
        InitRulesWrong: a rule matches no parameter, or a norm is drawn.
    """
    problems = []
    for rule in rules:
        if rule.pattern not in _BIASES and not any(matches(rule.pattern, name) for name in names):
            problems.append(f"{rule.pattern!r} matches no parameter")
    for name in names:
        for rule in rules if matches_any(norms, name) else ():
            if matches(rule.pattern, name):
                if rule.distribution != "constant":
                    drawn = f"drawn from {rule.distribution!r} by the rule {rule.pattern!r}"
                    problems.append(f"the norm {name!r} is {drawn}")
                break
    if problems:
        raise InitRulesWrong(builder=of, problems=problems)


def allocate(module: nn.Module, device: torch.device, *, tied: Sequence[tuple[str, str]] = ()) -> None:
    """Give ``module`` memory on ``device``, and compute the buffers that follow from its configuration.

    Its parameters have undefined values afterwards: draw or load them.

    Args:
        module: on the meta device; a pipeline stage of a model is one.
        device: on which the parameters and buffers get memory.
        tied: pairs (owner, user) of parameters that are one.

    Raises:
        BuffersNotReset: what a buffer holds is left to chance.
    """

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return torch.empty_like(tensor, device=device)
        # Torch has empty_like for the meta device as a Python function, which imports sympy: half a CPU-second.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    module._apply(emptied)  # type: ignore[no-untyped-call]  # as Module.to_empty does
    present = dict(module.named_parameters(remove_duplicate=False))
    for owner, user in tied:  # which moving off the meta device has separated
        if owner in present and user in present:
            path, _, leaf = user.rpartition(".")
            setattr(module.get_submodule(path), leaf, present[owner])
    empty = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    reset_buffers(module)
    buffers = dict(module.named_buffers())
    chance = [name for name, buffer, at in empty if buffers.get(name) is buffer and buffer._version == at]
    if chance:
        raise BuffersNotReset(buffers=chance)


def reset_buffers(module: nn.Module) -> None:
    """Compute the buffers that are not saved, each by the module that has it."""
    for part in reversed([*module.modules()]):  # a module may replace what its parts compute
        reset = getattr(part, "reset_buffers", None)
        if callable(reset):
            reset()


def draw_local_shard(shard: LocalShard, name: str, rules: Sequence[InitRule], *, seed: int) -> None:
    """Fill a rank's part of a parameter with its initial values, bitwise equal to those elements of the whole.

    They are drawn by name and position, so that no rank draws what another one holds.

    Args:
        shard: this rank's elements and their place in the whole parameter.
        name: the global one; of a tied parameter that of its owner.
        rules: initialisation rules, those of adapters first.
        seed: the run's, from which all initial weights follow.

    Raises:
        NoInitRule: no rule is for the parameter.
    """
    fill(shard.tensor, rule_for(name, rules), name=name, seed=seed, shape=shard.shape, offsets=shard.region.offsets)
