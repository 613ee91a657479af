"""Facts of one model, all of them seen on the model itself, built on the meta device, and its parallel plan.

Tensor and pipeline parallelism follow the plans that the model brings; the pipeline plan is tried out before it is
used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nxdt_core.distributed.devices import HOST, meta_device
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.patterns import matches
from nxdt_core.protocols.plan import AttentionHeads, ExpertPlan, InitRule, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_hf.architecture import CORE, Architecture, AttentionCall, HeadValues
from nxdt_plugin_hf.mixtures import (
    BIAS,
    DISPATCHER,
    REFUSED,
    STACK,
    STACK_SIDES,
    TENSOR_STYLE,
    mixtures,
    not_additive,
    routed_experts,
    router_balance,
)
from nxdt_plugin_hf.modeling import CausalLM, build_model, is_norm, pattern_of, trace_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_STYLES: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocab_embedding",
}
"""Theirs → ours."""
_FROM_PATHS = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
"""Their styles for modules that are in a tensor block and stay whole, and for attention with sinks; ours follow from
their paths."""
_ATTENTION: Sequence[Mapping[str, TensorStyle]] = (
    dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column"),
    dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj"), "column"),
    dict.fromkeys(("q_proj", "kv_b_proj"), "column"),
    dict.fromkeys(("q_b_proj", "kv_b_proj"), "column"),
)
"""Projections that make heads in attention that a plan leaves whole: grouped heads, without and with a gate of what
they give (AFMoE), and latent attention without and with a compressed query (DeepSeek-V2, arXiv:2405.04434). ``o_proj``
takes them."""
_LATENT = {"q_a_proj", "kv_a_proj_with_mqa"}
"""Projections that compress tokens for latent attention, whole on each rank."""


_FEED_FORWARD: Mapping[str, TensorStyle] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
"""Linear layers of a feed-forward block."""


_TOKENS = 4
_STD = 0.02
"""Default standard deviation of transformers, where a configuration names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Part of a model's plan that can be applied."""

    styles: Mapping[str, TensorStyle]
    blocks: tuple[str, ...]
    heads: AttentionHeads | None
    refusal: str | None
    """Reason why the plan cannot be followed; None where it can."""


def tensor_plan(model: CausalLM, calls: Mapping[str, AttentionCall], layers: str) -> TensorPlan:
    """Translate ``tp_plan`` of ``model``.

    A pattern that names nothing in the model is left out: plans name parts that only some configurations have. Experts
    are sharded by our plan for them where theirs shards them at all. ``calls`` are those of attention, and ``layers``
    is the path of the layers.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    sinks = [path for path, module in modules.items() if isinstance(module, HeadValues)]  # cut with their heads
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    theirs = {
        pattern: style
        for pattern, style in cast("PreTrainedModel", model).tp_plan.items()
        if any(matches(pattern, path) for path in (*modules, *parameters))
        and not any(matches(pattern, path) for path in sinks)
    }
    cut = {pattern for pattern, style in theirs.items() if style == TENSOR_STYLE}
    if not any(f"{pattern}.".startswith(f"{layers}.") for pattern in theirs):  # it has none for layers (gpt-oss)
        cut = {pattern_of(path) for path, _ in routed_experts(model)}
    readable = (*_STYLES, *_FROM_PATHS, TENSOR_STYLE)
    unknown = {pattern: style for pattern, style in theirs.items() if style not in readable}
    styles = {pattern: _STYLES[style] for pattern, style in theirs.items() if style in _STYLES}
    path, call = next(iter(calls.items()))
    attention = pattern_of(path)

    # Attention that the plan leaves whole, though it shards other layers; not where it has other linear layers than
    # those of ``_ATTENTION``, or norms across heads.
    if styles and not any(pattern.startswith(f"{attention}.") for pattern in styles):
        parts = dict(modules[path].named_children())
        wide = {name: part.out_features for name, part in parts.items() if isinstance(part, nn.Linear)}
        across = {tuple(p.shape) for name, part in parts.items() if name not in wide for p in part.parameters()}
        for columns in _ATTENTION:
            sharded = {*columns, "o_proj"}
            sizes = [wide.get(name, 1) for name in columns]
            makes_heads = not any(size % call.kv_heads or (size,) in across for size in sizes)
            if sharded <= wide.keys() <= sharded | _LATENT and makes_heads:
                styles |= {f"{attention}.{name}": style for name, style in {**columns, "o_proj": "row"}.items()}
                break
    styles |= {model.embedding_path: "vocab_embedding"}  # tied weights are sharded in the same way
    if model.head_path:
        styles |= {model.head_path: "score_head" if model.scores else "vocab_head"}

    # Feed-forward blocks that it leaves whole: experts for all tokens in the blocks around others, and what is in the
    # place of such a block in other layers.
    around = dict(mixtures(model, layers))
    feed_forward: dict[str, TensorStyle] = {}
    places = {pattern_of(block) for block in around} if cut else set()
    for name, part in modules.items():
        pattern = pattern_of(name)
        if pattern not in places and pattern.rpartition(".")[0] not in places:
            continue
        linear = {leaf for leaf, layer in part.named_modules() if type(layer) is nn.Linear}
        if linear == _FEED_FORWARD.keys() and not any(other.startswith(f"{pattern}.") for other in styles):
            feed_forward |= {f"{pattern}.{leaf}": style for leaf, style in _FEED_FORWARD.items()}
    styles |= feed_forward
    styles |= {p: "row_partial" for p, s in styles.items() if s == "row" and _inside(around, p, modules)}

    # Heads, unless attention sees all of them on each rank, and what has weights [heads, width], one row for each
    # sharded head: modules in attention, and the sinks.
    inner = {p: s for p, s in styles.items() if p not in (model.embedding_path, model.head_path)}
    projections = {p: s for p, s in inner.items() if p.rpartition(".")[0] == attention and s in ("column", "row")}
    makers = [pattern for pattern, style in projections.items() if style == "column"]
    heads: AttentionHeads | None = None
    if makers:
        widths = (call.key_width, call.value_width)
        shapes = {(count, width) for count in (call.heads, call.kv_heads) for width in widths}
        inside = [name for name in modules if name.startswith(f"{path}.") and pattern_of(name) not in inner]
        rows = {name: {tuple(p.shape) for p in modules[name].parameters(recurse=False)} for name in inside}
        norms = [pattern_of(name) for name, sizes in rows.items() if sizes and sizes <= shapes]
        norms += dict.fromkeys(f"{attention}.{other.sinks}" for other in calls.values() if other.sinks is not None)
        styles |= dict.fromkeys(norms, "heads")
        key_value = tuple(pattern for pattern in (*makers, *norms) if pattern.rpartition(".")[2][0] in "kv")
        heads = AttentionHeads(
            query_heads=call.heads,
            kv_heads=call.kv_heads,
            query=tuple(pattern for pattern in (*makers, *norms) if pattern not in key_value),
            key_value=key_value,
            output=tuple(pattern for pattern, style in projections.items() if style == "row"),
        )
    blocks = tuple(dict.fromkeys(pattern.rpartition(".")[0] for pattern in inner))
    ends = dict.fromkeys(pattern_of(block) for block in around)
    outer = [block for block in blocks if not any(block.startswith(f"{end}.") for end in ends)]
    return TensorPlan(
        styles=styles,
        blocks=tuple(dict.fromkeys((*outer, *ends, *(() if model.scores else (model.head_path,))))),
        heads=heads,
        refusal=_refusal(unknown, inner, blocks, modules, calls) or _refused_experts(model, cut, around, styles),
    )


def _inside(around: Collection[str], pattern: str, modules: Collection[str]) -> bool:
    """Return whether a pattern names modules in blocks around experts."""
    return any(matches(pattern, path) and any(path.startswith(f"{block}.") for block in around) for path in modules)


def _refused_experts(
    model: CausalLM, cut: Collection[str], around: Mapping[str, nn.Module], styles: Mapping[str, TensorStyle]
) -> str | None:
    experts = dict.fromkeys(pattern_of(path) for path, _ in routed_experts(model))
    whole = next((pattern for pattern in experts if pattern not in cut), None)
    if whole is not None:
        return f"its plan in transformers leaves the experts '{whole}' whole"
    blocks = {pattern_of(path): path for path in around}
    alone = next((pattern for pattern in experts if pattern.rpartition(".")[0] not in blocks), None)
    if alone is not None:
        return f"its experts '{alone}' are in no separate block"
    partial = [pattern for pattern, style in styles.items() if style == "row_partial"]
    for pattern, path in blocks.items():
        block = around[path]
        ends = [name for name, _ in block.named_modules() if any(matches(p, f"{path}.{name}") for p in partial)]
        biased = next((name for name in ends if getattr(block.get_submodule(name), "bias", None) is not None), None)
        if biased is not None:
            return f"'{pattern}.{biased}' has a bias, which each rank would add"
        if not_additive(block, model.get_parameter(f"{model.embedding_path}.weight").shape[1], ends):
            return f"'{pattern}' does more than to add up what its experts give, of which each rank has a part"
    return None


def _refusal(
    unknown: Mapping[str, str],
    styles: Mapping[str, TensorStyle],
    blocks: tuple[str, ...],
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, AttentionCall],
) -> str | None:
    if unknown:
        named = ", ".join(f"'{pattern}' as {style}" for pattern, style in unknown.items())
        return f"its plan in transformers names {named}, which cannot be sharded here"
    if not styles:
        return "transformers has no tensor parallel plan for its layers"
    path = next(iter(calls))
    attention = pattern_of(path)
    if attention not in blocks:
        return f"its plan in transformers leaves attention ('{attention}') whole"
    for block in blocks:
        ends = {style for pattern, style in styles.items() if pattern.rpartition(".")[0] == block}
        if not ends & {"row", "row_split", "row_partial"} or not ends & {"column", "column_gathered"}:
            return f"in its plan '{block}' does not begin with columns and end with rows"
    for pattern in styles:
        wrong = next((p for p, m in modules.items() if matches(pattern, p) and type(m) is not nn.Linear), None)
        if wrong is not None:
            return f"its plan names '{wrong}', a {type(modules[wrong]).__name__}, where only torch.nn.Linear is sharded"
    alone = next((name for name, _ in modules[path].named_parameters(recurse=False)), None)
    if alone is not None:
        return f"'{attention}.{alone}' belongs to no layer that its plan shards"
    if len({(call.heads, call.kv_heads) for call in calls.values()}) > 1:
        return "its layers have different numbers of heads"
    fused = any(s == "column" and p.rpartition(".")[2].startswith(("qkv", "query_key")) for p, s in styles.items())
    call = next(iter(calls.values()))
    if fused and call.heads != call.kv_heads:
        return "one matrix makes its queries, keys and values, and their heads are shared"
    return None


def pipeline_plan(model: CausalLM, layers: str, hidden_size: int) -> tuple[PipelinePlan | None, str]:
    """Translate ``pp_plan`` of ``model``, which is whole and on the meta device, and is not changed.

    Returns:
        The plan, or None and why there is none.
    """
    theirs = cast("PreTrainedModel", model).pp_plan or {}
    if layers not in theirs:
        return None, "transformers has no pipeline plan for it"
    first, last = [model.embedding_path], [model.head_path]
    modules = dict(model.named_modules())
    for path, (takes, _) in theirs.items():
        if path not in (layers, *first, *last) and path in modules:
            (first if takes[0] in ("input_ids", "inputs_embeds") else last).insert(-1, path)
    # A stage between others, without its layers, must hand on what it is given: what is left of the model changes
    # nothing, and knows nothing of the first stage's or the last's.
    stage = copy.deepcopy(model)
    stage.get_submodule(layers)._modules.clear()
    for path in (*first, *last):
        stage.set_submodule(path, nn.Identity())
    left = [name for name, _ in stage.named_parameters()]
    if left:
        return None, f"its plan in transformers puts {', '.join(left)} on no stage"
    stage.to_empty(device=HOST)
    stage.reset_buffers()
    hidden = torch.linspace(-1, 1, _TOKENS * hidden_size).view(1, _TOKENS, hidden_size)
    try:
        with torch.no_grad():
            handed_on = stage.eval()(hidden, torch.arange(_TOKENS)[None])
    except Exception as error:  # a model's own code may raise anything
        return None, f"a stage without the first layers does not run ({type(error).__name__}: {error})"
    if not isinstance(handed_on, torch.Tensor) or not torch.equal(handed_on, hidden):
        return None, "its forward changes hidden states outside of its layers, on every stage"
    return PipelinePlan(hidden_size=hidden_size, first=tuple(first), layers=layers, last=tuple(last)), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the whole model. Paths are patterns but for those of parameters."""

    calls: Mapping[str, AttentionCall]
    """Call of each attention module, by path."""
    parameters: tuple[str, ...]
    """Names; a tied one under its first."""
    plan: ParallelPlan
    """Capabilities by transformers' own plans, as far as they were seen to work."""
    init_rules: tuple[InitRule, ...]
    experts: Mapping[str, str]
    """Path of our matrices of experts → path of the module that they are of."""
    multiplied: int
    """Weights that a token is multiplied with, of experts those of as many as it is sent to."""

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFacts:
        """Look at the model.

        Raises:
            UnsupportedArchitecture, NotACausalLM: it does what cannot be trained here.
        """
        calls, experts_per_token = trace_model(architecture)
        with meta_device():
            model = build_model(architecture, calls)
        attention = pattern_of(next(iter(calls)))
        layers, core = attention.partition(".*.")[0], f"{attention}.{CORE}"
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
        parameters = (named for part in parts for named in part.named_parameters(recurse=False))
        dense = sum(p.numel() for name, p in parameters if p.ndim == 2 and not name.endswith(BIAS))
        experts = ((model.get_submodule(path), top_k) for path, top_k in experts_per_token.items())
        routed = sum(p.numel() // len(p) * n for part, n in experts for p in part.parameters() if p.ndim == 3)
        norms = tuple(dict.fromkeys(pattern_of(path) for path, module in model.named_modules() if is_norm(module)))
        mixed = tuple(dict.fromkeys(pattern_of(path) for path in experts_per_token))
        biased = any(f".{STACK}." in name and name.endswith(BIAS) for name, _ in model.named_parameters())
        plan = ParallelPlan(
            tensor=tensor.styles,
            tensor_blocks=tensor.blocks,
            heads=tensor.heads,
            pipeline=pipeline,
            attention_cores=(core,),
            experts=ExpertPlan(
                modules=tuple(f"{path}.{STACK}" for path in mixed),
                tensor={
                    f"{path}.{STACK}.{name}{end}": side
                    for path in mixed
                    for name, side in STACK_SIDES.items()
                    for end in ("", *([BIAS] if biased else []))
                },
                dispatchers=tuple(f"{path}.{DISPATCHER}" for path in mixed),
                routers=mixed,
            ),
            recompute={"CoreAttention": (core,), **{name: tuple(paths) for name, paths in classes.items()}},
            recompute_layer=f"{layers}.*",
            norms=tuple(f"{norm}.weight" for norm in norms),
            no_weight_decay=("*.bias", *([f"*_proj{BIAS}"] if biased else [])),
            tied=tuple(tied),
            refused={dimension: reason for dimension, reason in reasons.items() if reason},
        )
        return cls(
            calls=calls,
            parameters=tuple(name for name, _ in model.named_parameters()),
            plan=plan,
            init_rules=rules,
            experts={f"{path}.{STACK}": path for path in experts_per_token},
            multiplied=dense + routed,
        )


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
        kinds = {name: pattern_of(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
        kinds |= {n: pattern_of(f"{path}.{n}.weight") for n, p in module.named_children() if isinstance(p, HeadValues)}
        if isinstance(module, HeadValues) or all(pattern in rules for pattern in kinds.values()):
            continue
        alone = copy.deepcopy(module)  # with the parameters that transformers' initialisation expects in it
        for name, part in list(alone.named_children()):
            if isinstance(part, HeadValues):
                delattr(alone, name)
                alone.register_parameter(name, part.weight)
        # What begins as random numbers; norms of single heads, matrices, do not.
        matrices = {name for name in kinds if not is_norm(module) and not name.endswith(BIAS)}
        parameters = {name: alone.get_parameter(name) for name in kinds}
        drawn = {name: name in matrices and p.ndim >= 2 and p.requires_grad for name, p in parameters.items()}
        constants = {} if all(drawn.values()) else _constants(model, alone)
        for name, pattern in kinds.items():
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
    """Return the number with which its initialisation fills each parameter of ``alone``; of random ones NaN."""
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
    constants = {}
    for name, first in tried[0].items():
        number = first.flatten()[0]
        if bool((first == number).all()):
            constants[name] = float(number)
        elif bool(first.isfinite().all()) and not torch.equal(first, tried[1][name]):
            constants[name] = float("nan")
    return constants
