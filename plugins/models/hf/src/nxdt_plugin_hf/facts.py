"""Facts of one model, all of them seen on the model itself, built on the meta device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.protocols.plan import ExpertPlan, InitRule, ParallelPlan, PipelinePlan
from nxdt_plugin_hf.architecture import CORE, Architecture, AttentionCall, HeadValues
from nxdt_plugin_hf.mixtures import (
    BIAS,
    DISPATCHER,
    REFUSED,
    STACK,
    STACK_SIDES,
    router_balance,
)
from nxdt_plugin_hf.modeling import CausalLM, build_model, is_norm, pattern_of, trace_model
from nxdt_plugin_hf.plan import TensorPlan, pipeline_plan, tensor_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the whole model. Paths are patterns but for those of parameters."""

    calls: Mapping[str, AttentionCall]
    """Call of each attention module, by path."""
    layers: str
    """Path of the layers."""
    parameters: tuple[str, ...]
    """Names; a tied one under its first."""
    tied: tuple[tuple[str, str], ...]
    """Owner and user."""
    norms: tuple[str, ...]
    """Normalising modules."""
    classes: Mapping[str, tuple[str, ...]]
    """Class name → paths, of layers, their parts and norms."""
    tensor: TensorPlan
    pipeline: PipelinePlan | None
    refused: Mapping[str, str]
    """Mesh dimension → why the model cannot be laid out along it."""
    init_rules: tuple[InitRule, ...]
    experts: Mapping[str, str]
    """Path of our matrices of experts → path of the module that they are of."""
    biased: bool
    """True if experts have biases."""
    multiplied: int
    """Weights that a token is multiplied with, of experts those of as many as it is sent to."""

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFacts:
        """Look at the model.

        Raises:
            UnsupportedArchitecture, NotACausalLM: it does what cannot be trained here.
        """
        trace = trace_model(architecture)
        calls = trace.attention
        with torch.device("meta"):
            model = build_model(architecture, calls)
        layers = pattern_of(next(iter(calls))).partition(".*.")[0]
        tensor = tensor_plan(model, calls, layers)
        hidden_size = model.get_parameter(f"{model.embedding_path}.weight").shape[1]
        with HOST:  # independent of the caller's default device
            rules = init_rules(architecture, model)
            pipeline, no_pipeline = pipeline_plan(model, layers, hidden_size)
        owners: dict[nn.Parameter, str] = {}
        everything = [*model.named_parameters(remove_duplicate=False)]
        tied = [(owner, name) for name, p in everything if (owner := owners.setdefault(p, name)) != name]
        reasons = {"tp": tensor.refusal, "pp": no_pipeline}
        if router_balance(architecture, model) is not None:
            reasons["pp"] = no_pipeline or REFUSED.format(what="the routers of all layers in one process")
            reasons["cp"] = REFUSED.format(what="whole sequences")
        classes: dict[str, dict[str, None]] = {}
        for path, module in model.named_modules():
            depth = len(path.removeprefix(f"{layers}.").split(".")) if path.startswith(f"{layers}.") else 0
            if depth in (1, 2) and any(True for _ in module.parameters()):
                classes.setdefault(type(module).__name__, {})[pattern_of(path)] = None
        parts = (module for module in model.modules() if not isinstance(module, nn.Embedding))
        own = (named for part in parts for named in part.named_parameters(recurse=False))
        dense = sum(p.numel() for name, p in own if p.ndim == 2 and not name.endswith(BIAS))
        experts = ((model.get_submodule(path), top_k) for path, top_k in trace.experts.items())
        routed = sum(p.numel() // len(p) * n for part, n in experts for p in part.parameters() if p.ndim == 3)
        return cls(
            calls=calls,
            layers=layers,
            parameters=tuple(name for name, _ in model.named_parameters()),
            tied=tuple(tied),
            norms=tuple(dict.fromkeys(pattern_of(path) for path, module in model.named_modules() if is_norm(module))),
            classes={name: tuple(paths) for name, paths in classes.items()},
            tensor=tensor,
            pipeline=pipeline,
            refused={dimension: reason for dimension, reason in reasons.items() if reason},
            init_rules=rules,
            experts={f"{path}.{STACK}": path for path in trace.experts},
            biased=any(f".{STACK}." in name and name.endswith(BIAS) for name, _ in model.named_parameters()),
            multiplied=dense + routed,
        )

    @property
    def attention(self) -> str:
        """Return the pattern of the attention modules."""
        return pattern_of(next(iter(self.calls)))

    def plan(self) -> ParallelPlan:
        """Return the capabilities by transformers' own plans, as far as they were seen to work."""
        core = f"{self.attention}.{CORE}"
        routed = tuple(dict.fromkeys(pattern_of(experts) for experts in self.experts.values()))
        return ParallelPlan(
            tensor=self.tensor.styles,
            tensor_blocks=self.tensor.blocks,
            sequence_norms=tuple(n for n in self.norms if n.rpartition(".")[0] not in self.tensor.blocks),
            heads=self.tensor.heads,
            pipeline=self.pipeline,
            attention_cores=(core,),
            experts=ExpertPlan(
                modules=tuple(f"{experts}.{STACK}" for experts in routed),
                tensor={
                    f"{experts}.{STACK}.{name}{end}": side
                    for experts in routed
                    for name, side in STACK_SIDES.items()
                    for end in ("", *([BIAS] if self.biased else []))
                },
                dispatchers=tuple(f"{experts}.{DISPATCHER}" for experts in routed),
                routers=routed,
            ),
            recompute={"CoreAttention": (core,), **self.classes},
            recompute_layer=f"{self.layers}.*",
            norms=tuple(f"{norm}.weight" for norm in self.norms),
            no_weight_decay=("*.bias", *([f"*_proj{BIAS}"] if self.biased else [])),
            tied=self.tied,
            refused=self.refused,
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """6 for each weight that a token is multiplied with (embeddings are looked up), and for each layer 6 for each
        channel of query and value heads and position that is seen: PaLM's convention (arXiv:2204.02311, appendix B),
        within the window where a layer has one."""
        seen = ((call, min(sequence_length, call.window or sequence_length)) for call in self.calls.values())
        attention = sum(call.heads * (call.key_width + call.value_width) * positions for call, positions in seen)
        return 6.0 * (self.multiplied + attention)


_STD = 0.02
"""Default standard deviation of transformers, where a configuration names none."""


def init_rules(architecture: Architecture, model: CausalLM) -> tuple[InitRule, ...]:
    """Return one rule a kind of parameter.

    Matrices are normal with the configuration's ``initializer_range``, as in the initialisation that transformers'
    models inherit. What vectors begin with, and matrices that are not trained, is seen on a copy of the module that has
    them: one number, or random ones, which are normal as well. A number may also be the constructor's (Apertus); those
    that are filled otherwise have no rule, so that they can come from a checkpoint alone. Biases of experts are zero.
    (transformers also sets the padding token's row to zero; here it is drawn.)
    """
    std = getattr(cast("PreTrainedModel", model).config, "initializer_range", None) or _STD
    rules: dict[str, InitRule] = {}
    for path, module in model.named_modules():
        own = {name: pattern_of(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
        own |= {n: pattern_of(f"{path}.{n}.weight") for n, p in module.named_children() if isinstance(p, HeadValues)}
        if isinstance(module, HeadValues) or all(pattern in rules for pattern in own.values()):
            continue
        alone = copy.deepcopy(module)  # with the parameters that transformers' initialisation expects in it
        for name, part in list(alone.named_children()):
            if isinstance(part, HeadValues):
                delattr(alone, name)
                alone.register_parameter(name, part.weight)
        # What begins as random numbers; norms of single heads, matrices, do not.
        matrices = {name for name in own if not is_norm(module) and not name.endswith(BIAS)}
        parameters = {name: alone.get_parameter(name) for name in own}
        drawn = {name: name in matrices and p.ndim >= 2 and p.requires_grad for name, p in parameters.items()}
        constants = {} if all(drawn.values()) else _constants(model, alone)
        for name, pattern in own.items():
            if drawn[name] or math.isnan(constants.get(name, 0.0)):
                rules[pattern] = InitRule(pattern=pattern, distribution="normal", std=std)
            elif name in constants:
                rules[pattern] = InitRule(pattern=pattern, distribution="constant", mean=constants[name])
    left = {pattern_of(name) for name, _ in model.named_parameters()} - rules.keys()
    if left:  # what constructors fill with a number of their code
        with torch.device("meta"), _Literals():
            filled = {pattern_of(name): p for name, p in architecture.new().named_parameters() if p.device == HOST}
        for pattern, parameter in filled.items():
            if pattern in left and parameter.numel() == 1:
                number = float(parameter.detach().flatten()[0])
                rules[pattern] = InitRule(pattern=pattern, distribution="constant", mean=number)
    return tuple(rules.values())


class _Literals(TorchFunctionMode):
    """Makes the tensors of numbers in code on the host."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **({"device": HOST} if func is torch.tensor else {}) | (kwargs or {}))


@torch.no_grad()
def _constants(model: CausalLM, alone: nn.Module) -> dict[str, float]:
    """Parameters of ``alone`` that its initialisation fills with one number, or with random ones: NaN."""
    if isinstance(alone, nn.Linear):  # its matrix may be large; transformers' own rule for all
        return {"bias": 0.0}
    if isinstance(alone, SwiGLUExperts):  # which transformers does not know
        return {name: 0.0 for name, _ in alone.named_parameters(recurse=False)}
    alone.to_empty(device=HOST)
    tried = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            for parameter in alone.parameters(recurse=False):
                parameter.fill_(float("nan"))
            cast("PreTrainedModel", model)._init_weights(alone)
            tried.append({name: p.clone() for name, p in alone.named_parameters(recurse=False) if p.numel()})
    found = {}
    for name, first in tried[0].items():
        number = first.flatten()[0]
        if bool((first == number).all()):
            found[name] = float(number)
        elif bool(first.isfinite().all()) and not torch.equal(first, tried[1][name]):
            found[name] = float("nan")
    return found
