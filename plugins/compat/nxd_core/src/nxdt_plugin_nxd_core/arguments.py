"""The arguments of NxD Core's calls: those that change nothing here, what the others take, and the errors of both."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from nxdt_core.errors import NxdtError
from nxdt_plugin_nxd_core.errors import ArgumentMeansNothing, CallDoesNotBind

__all__ = ["TAKEN", "binds", "call_check", "expect", "refused"]

_log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Argument(NamedTuple):
    """An argument of NxD Core that has one value here, which is its default."""

    at: int
    """Place in NxD Core's signature, without ``self``."""
    default: Any
    ignored: str = ""
    """Why another value has no effect, which is logged once; empty for what nobody needs to know."""
    refused: str = ""
    """Why another value is refused; empty if it is not."""
    advice: str = ""


_NONE = "has no counterpart"
_PARTS = "needs a model whose parts the engine knows"
_TRAINED = "Leave it out, or train the model as a plugin: distributed_strategy has this size for `nxdt train`."
_TABLE = "Leave it out: a sharded table cannot follow it."
_SUMMED = "Leave it out: the layer's output is the sum over the ranks."
_CUT = "shards are cut from the whole weight"
_PLACED = "each shard has its place in the whole"
_ONCE = "the loss is the same on all ranks and rank 0 logs"
_PAD = "Leave it out, and choose sizes that the tensor parallel size divides."
_GROUP = "Leave it out: the group is that of neuronx_distributed_config."
_ORDER = "Leave it out: ranks follow each other."
_LINEAR = {
    "stride": Argument(
        6, 1, "", _NONE, "Leave it out: fused matrices are separate layers here, such as gate_proj and up_proj."
    ),
    "keep_master_weight": Argument(10, False, _CUT),
    "skip_bias_add": Argument(11, False, "", _NONE, "Leave it out, and add the bias in the layer."),
    "pad": Argument(12, False, "", _NONE, _PAD),
}

FIXED: Mapping[str, Mapping[str, Argument]] = {
    "neuronx_distributed_config": {
        "pad_model": Argument(
            *(5, False, "", "would change the caller's own modules"),
            "Leave it out, and choose a tensor_parallel_size that divides the numbers of heads.",
        ),
        "expert_parallel_size": Argument(9, 1, "", _PARTS, _TRAINED),
        "context_parallel_size": Argument(10, 1, "", _PARTS, _TRAINED),
        "mixed_precision_config": Argument(
            *(11, None, "", "would change the dtype that the module has"),
            "Leave it out, and give the module the dtype to train in: float32, or bfloat16 for less memory.",
        ),
        "sequential_move_factor": Argument(12, 11, "each rank builds its module at once"),
        "lnc_size": Argument(13, 1, "the engine takes the device that it finds"),
    },
    "initialize_parallel_model": {"include_buffers": Argument(3, False, "buffers are moved always")},
    "ColumnParallelLinear": {
        **_LINEAR,
        "tensor_model_parallel_group": Argument(13, None, "", _NONE, _GROUP),
        "reduce_dtype": Argument(14, None),
        "rank_ordering": Argument(15, None, "", _NONE, _ORDER),
    },
    "RowParallelLinear": {
        **_LINEAR,
        "reduce_output": Argument(13, True, "", _NONE, _SUMMED),
        "tensor_model_parallel_group": Argument(14, None, "", _NONE, _GROUP),
        "reduce_dtype": Argument(15, None),
        "rank_ordering": Argument(16, None, "", _NONE, _ORDER),
    },
    "ParallelEmbedding": {
        "max_norm": Argument(3, None, "", _NONE, _TABLE),
        "norm_type": Argument(4, 2.0),
        "scale_grad_by_freq": Argument(5, False, "", _NONE, _TABLE),
        "sparse": Argument(6, False, "", _NONE, _TABLE),
        "shard_across_embedding": Argument(10, False, "", _NONE, "Leave it out: tables are sharded by row."),
        "pad": Argument(11, False, "", _NONE, _PAD),
        "collect_output": Argument(14, True, "", _NONE, _SUMMED),
        "tensor_model_parallel_group": Argument(15, None, "", _NONE, _GROUP),
        "rank_ordering": Argument(16, None, "", _NONE, _ORDER),
    },
    "GQAQKVColumnParallelLinear": {"fuse_qkv": Argument(9, True, "one input gather serves three matrices")},
    "parallel_cross_entropy": {
        "label_smoothing": Argument(
            *(2, 0.0, "", "is not computed"),
            "Leave it out, or compute the loss from logits of the whole vocabulary (gather_output=True).",
        )
    },
    "clip_grad_norm": {
        "norm_type": Argument(
            2, 2, "", "is not computed over ranks", "Leave it out: the 2-norm over all gradients is clipped."
        )
    },
    "NeuronZero1Optimizer": {
        "optimizer_dtype": Argument(2, None),
        "use_grad_acc_hook": Argument(5, False),
        "pin_layout": Argument(6, True, "there is no XLA layout"),
        "sharding_groups": Argument(7, None, "the mesh has the groups"),
        "grad_norm_groups": Argument(8, None, "the mesh has the groups"),
    },
    "NeuronZero1Optimizer.save_sharded_state_dict": {
        "save_serially": Argument(1, True, "each rank writes its share at once")
    },
    "NeuronZero1Optimizer.load_sharded_state_dict": {
        "num_workers_per_step": Argument(1, 8, "each rank reads its share at once")
    },
    "save_checkpoint": {
        "num_workers": Argument(6, 8, "each rank writes its share at once"),
        "use_xser": Argument(7, False, "tensors are written one by one always"),
        "zero1_optimizer": Argument(10, False, _PLACED),
        "use_zero1_dcp": Argument(11, False, _PLACED),
        "avoid_saving_lower_precision_weights": Argument(12, False, "each weight is saved once"),
        "nxd_config": Argument(13, None),
    },
    "load_checkpoint": {
        "num_workers": Argument(5, 8, "each rank reads its share at once"),
        "use_zero1_dcp": Argument(7, False, _PLACED),
    },
    "save": {
        "save_serially": Argument(2, True, "all ranks write their files at the same time"),
        "save_xser": Argument(3, False, "one file per rank holds its tensors"),
    },
    "load": {"load_xser": Argument(3, False, "the files show how they were written")},
    "LoraConfig": {
        "save_lora_config_adapter": Argument(13, True, "each checkpoint holds the options"),
        "merge_sharded_lora": Argument(17, False, "checkpoints are the same in every layout"),
    },
    "NeuronLTModule": {
        "log_rank0": Argument(11, False, _ONCE),
        "manual_opt": Argument(
            12, True, "", "would leave the steps to Lightning", "Leave it out: the module steps by itself."
        ),
    },
    "NeuronXLAStrategy": {"save_load_xser": Argument(3, True, "checkpoints are those of the core")},
    "NeuronXLAPrecisionPlugin": {
        "mixed_precision_enabled": Argument(0, False, "the dtype of the module decides"),
    },
    "NeuronTensorBoardLogger": {"log_rank0": Argument(1, False, _ONCE)},
}
"""Arguments with one value, by call, in NxD Core's order."""


_KINDS: Sequence[tuple[str, Callable[[Any], bool], Sequence[str]]] = (
    ("an integer", lambda value: type(value) is int, ("tensor_parallel_size", "pipeline_parallel_size")),
    (
        "an integer of at least 1",
        lambda value: type(value) is int and value >= 1,
        (
            *("input_size", "output_size", "num_embeddings", "embedding_dim", "kv_size_multiplier"),
            *("num_kept_ckpts", "grad_accum_steps", "hidden_size", "virtual_pipeline_size"),
        ),
    ),
    ("a number from 1 to 32", lambda value: value in range(1, 33), ("num_workers",)),
    (
        "a number above 0",
        lambda value: isinstance(value, int | float | torch.Tensor) and float(value) > 0,
        ("max_norm",),
    ),
    ("a number", lambda value: isinstance(value, int | float | torch.Tensor), ("lr",)),
    (
        "a path",
        lambda value: isinstance(value, str | os.PathLike) and str(value) != "",
        ("path", "save_dir", "load_dir"),
    ),
    ("a tensor", lambda value: isinstance(value, torch.Tensor), ("vocab_parallel_logits", "target")),
    ("a torch.dtype", lambda value: isinstance(value, torch.dtype), ("dtype",)),
    (
        "a list of two sizes, [query_features, key_features]",
        lambda value: isinstance(value, list | tuple) and len(value) == 2,
        ("output_sizes",),
    ),
    (
        "a list of names of layers",
        lambda value: isinstance(value, list | tuple) and all(isinstance(each, str) for each in value),
        ("pipeline_cuts",),
    ),
    (
        "a dictionary",
        lambda value: isinstance(value, Mapping),
        (
            *("pipeline_config", "optimizer_config", "model_init_config", "state_dict"),
            *("model_kwargs", "opt_kwargs", "scheduler_kwargs"),
        ),
    ),
    (
        "a tuple or a list",
        lambda value: isinstance(value, tuple | list),
        ("model_args", "opt_args", "scheduler_args"),
    ),
    ("a function", callable, ("init_method", "param_init_fn")),
    ("a function or a class", callable, ("model_fn", "optimizer_class", "opt_cls", "scheduler_cls")),
    (
        "a class of modules",
        lambda value: isinstance(value, type) and issubclass(value, nn.Module),
        ("transformer_layer_cls",),
    ),
    ("a torch.nn.Module", lambda value: isinstance(value, nn.Module), ("module",)),
    ("a LoraConfig", lambda value: hasattr(value, "section"), ("lora_config",)),
    ("model.parameters()", lambda value: isinstance(value, Iterable), ("params", "parameters")),
    (
        "a scheduler with state_dict and load_state_dict",
        lambda value: hasattr(value, "state_dict") and hasattr(value, "load_state_dict"),
        ("scheduler",),
    ),
)
TAKEN = {argument: (what, test) for what, test, arguments in _KINDS for argument in arguments}
"""What an argument or a key takes besides its default, by its name in whatever call, and the test of a value."""


def binds(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of NxD Core's API so that it checks its arguments, and has those of :data:`FIXED`, too.

    The function itself has no parameters for the latter. The first call with another value of one that has no effect
    logs a warning.

    Raises:
        CallDoesNotBind: when the function is called: arguments that are missing, unknown or too many.
        ArgumentMeansNothing: an argument that is refused, or is not what :data:`TAKEN` says.
    """
    name = function.__qualname__.removesuffix(".__init__")
    fixed = FIXED.get(name, {})
    own = inspect.signature(function)
    parameters = [*own.parameters.values()]
    skipped = int("." in function.__qualname__)  # self
    for argument, each in fixed.items():
        if argument not in own.parameters:
            kind = max(parameters[skipped + each.at - 1].kind, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            kind = inspect.Parameter.KEYWORD_ONLY if kind == inspect.Parameter.VAR_POSITIONAL else kind
            parameters.insert(skipped + each.at, inspect.Parameter(argument, kind, default=each.default))
    signature = own.replace(parameters=parameters)
    noted: set[str] = set()

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        bound = _bind(name, signature, skipped, args, kwargs)
        for argument, value in [*bound.arguments.items()]:
            if argument in fixed:
                _check_fixed(name, argument, value, fixed[argument], noted)
                if argument not in own.parameters:
                    del bound.arguments[argument]
            if argument in TAKEN and value is not signature.parameters[argument].default:
                what, test = TAKEN[argument]
                expect(name, argument, value, what, when=test(value))
        return function(*bound.args, **bound.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _check_fixed(call: str, argument: str, value: Any, fixed: Argument, noted: set[str]) -> None:
    if value == fixed.default or (fixed.default is None and isinstance(value, Mapping) and not value):
        return
    if fixed.refused:
        raise refused(call, argument, _shown(value), fixed.refused, fixed.advice)
    if fixed.ignored and argument not in noted:
        noted.add(argument)
        _log.warning("%s: %s has no effect: %s", call, argument, fixed.ignored)


def call_check(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that raises ``CallDoesNotBind`` for arguments that ``function``, which is not kept, has not."""
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-in classes
        return lambda *args, **kwargs: None
    return lambda *args, **kwargs: _bind(name, signature, 0, args, kwargs) and None


def _bind(
    name: str, signature: inspect.Signature, skipped: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    parameters = [*signature.parameters.values()][skipped:]
    known = [each.name for each in parameters]
    unknown = [each for each in kwargs if each not in known]
    missing = [
        each.name
        for number, each in enumerate(parameters)
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        if number >= len(args) - skipped and each.name not in kwargs
    ]
    if unknown:
        problem = f"it has no argument '{unknown[0]}'"
    elif missing:
        problem = f"the argument '{missing[0]}' is missing"
    raise CallDoesNotBind(call=name, problem=problem, arguments=known)


def expect(call: str, argument: str, value: Any, what: str, *, when: bool) -> None:
    """Raise unless ``when``.

    Raises:
        ArgumentMeansNothing: naming ``what`` the argument takes.
    """
    if not when:
        raise refused(call, argument, _shown(value), f"is not {what}", f"Pass {what}.")


def refused(call: str, argument: str, value: str, reason: str, advice: str) -> NxdtError:
    """Return the error of an argument that has no meaning here; ``reason`` follows its value in the message."""
    return ArgumentMeansNothing(call=call, argument=argument, value=value, reason=reason, advice=advice)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"<{type(value).__name__}>"
