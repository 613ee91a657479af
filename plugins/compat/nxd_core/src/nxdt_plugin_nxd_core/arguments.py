"""The arguments of NxD Core's calls: those that change nothing here, what the others take, and the errors of both."""

from __future__ import annotations

import csv
import functools
import inspect
import logging
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from os import PathLike
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from nxdt_core.errors import NxdtError
from nxdt_plugin_nxd_core.errors import ArgumentMeansNothing, CallDoesNotBind

_log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


class Argument(NamedTuple):
    """An argument of a call of NxD Core, or a key, that has one value here: a row of ``fixed_arguments.csv``."""

    name: str
    place: int | None
    """Position in NxD Core's signature, without ``self``; None for a key."""
    default: Any
    state: Literal["refused", "ignored", "unused"]
    """Effect of another value: an error, a warning, or nothing."""
    reason: str
    advice: str


def _table(name: str) -> list[list[Any]]:
    return [*csv.reader(files(__package__).joinpath(name).read_text("utf-8").splitlines())][1:]


FIXED: dict[str, dict[str, Argument]] = {}
"""Arguments that have one value here, by call and name, in NxD Core's order."""
for call, name, place, default, *others in _table("fixed_arguments.csv"):
    row = Argument(name, literal_eval(place or "None"), literal_eval(default or "None"), *others)
    FIXED.setdefault(call, {})[name] = row

_REFUSALS = {(call, argument): (reason, advice) for call, argument, reason, advice in _table("refusals.csv")}
"""Reason and advice for a value that has no meaning here, by call and argument; ``*`` stands for several calls."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


_KINDS: Sequence[tuple[str, type | tuple[type, ...] | Callable[[Any], bool], str]] = (
    ("an integer", lambda value: type(value) is int, "tensor_parallel_size pipeline_parallel_size"),
    ("an integer of at least 1", _is_count, "input_size output_size num_embeddings embedding_dim kv_size_multiplier"),
    ("an integer of at least 1", _is_count, "num_kept_ckpts grad_accum_steps hidden_size virtual_pipeline_size"),
    ("a number from 1 to 32", lambda value: value in range(1, 33), "num_workers"),
    ("a number above 0", lambda value: isinstance(value, int | float | torch.Tensor) and float(value) > 0, "max_norm"),
    ("a number", (int, float, torch.Tensor), "lr"),
    ("a path", lambda value: isinstance(value, str | PathLike) and str(value) != "", "path save_dir load_dir"),
    ("a tensor", torch.Tensor, "vocab_parallel_logits target"),
    ("a torch.dtype", torch.dtype, "dtype"),
    ("a list of two sizes", lambda value: isinstance(value, tuple | list) and len(value) == 2, "output_sizes"),
    (
        "a list of names of layers",
        lambda value: isinstance(value, tuple | list) and all(isinstance(name, str) for name in value),
        "pipeline_cuts",
    ),
    ("a list of names of layers", (str, list, tuple, set), "target_modules modules_to_save"),
    ("default or gaussian", lambda value: value != "pissa", "init_lora_weights"),
    ("a dictionary", Mapping, "pipeline_config optimizer_config model_init_config state_dict"),
    ("a dictionary", Mapping, "model_kwargs opt_kwargs scheduler_kwargs"),
    ("a tuple or a list", (tuple, list), "model_args opt_args scheduler_args"),
    ("a function", callable, "init_method param_init_fn"),
    ("a function or a class", callable, "model_fn optimizer_class opt_cls scheduler_cls"),
    ("a class of modules", _is_module_class, "transformer_layer_cls"),
    (
        "'full', a class of modules, or None",
        lambda value: value == "full" or all(map(_is_module_class, value if isinstance(value, tuple) else (value,))),
        "activation_checkpoint_config",
    ),
    ("a torch.nn.Module", nn.Module, "module"),
    ("a LoraConfig", lambda value: hasattr(value, "section"), "lora_config config"),
    ("model.parameters()", Iterable, "params parameters"),
    (
        "a scheduler with state_dict and load_state_dict",
        lambda value: hasattr(value, "state_dict") and hasattr(value, "load_state_dict"),
        "scheduler",
    ),
)
_TAKEN = {name: (what, test) for what, test, names in _KINDS for name in names.split()}
"""Values that an argument or a key takes besides its default, by its name in any call: words, and a class or a test."""


def binds(function: Function) -> Function:
    """Decorate a function of NxD Core's API so that it checks its arguments, and has those of :data:`FIXED`, too.

    The function itself has no parameters for the latter. The first call with another value of one that has no effect
    logs a warning.

    Raises:
        CallDoesNotBind: when the function is called: arguments that are missing, unknown or too many.
        ArgumentMeansNothing: an argument that is refused, or is of another kind.
    """
    name = function.__qualname__.removesuffix(".__init__")
    fixed = FIXED.get(name, {})
    declared = inspect.signature(function)
    parameters = [*declared.parameters.values()]
    skipped = int("." in function.__qualname__)  # self
    for argument in fixed.values():
        if argument.name not in declared.parameters:
            at = skipped + (argument.place or 0)
            named = any(parameter.kind > inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters[:at])
            kind = inspect.Parameter.KEYWORD_ONLY if named else inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.insert(at, inspect.Parameter(argument.name, kind, default=argument.default))
    signature = declared.replace(parameters=parameters)
    noted: set[str] = set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = _bind(name, signature, *args, **kwargs)
        for argument, value in [*bound.arguments.items()]:
            row, empty = fixed.get(argument), isinstance(value, Mapping) and not value
            if row is not None and value != row.default and not (empty and row.default is None):
                if row.state == "refused":
                    texts = {"reason": row.reason, "advice": row.advice}
                    raise ArgumentMeansNothing(call=name, argument=argument, value=_shown(value), **texts)
                if row.state == "ignored" and argument not in noted:
                    noted.add(argument)
                    _log.warning("%s: %s has no effect: %s", name, argument, row.reason)
            if argument not in declared.parameters:
                del bound.arguments[argument]
            if value is not signature.parameters[argument].default:
                check(name, argument, value)
        return function(*bound.args, **bound.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Function, call)


def call_check(function: Callable[..., Any]) -> Callable[..., object]:
    """Return a function that raises ``CallDoesNotBind`` for arguments that ``function``, which is not kept, has not."""
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-in classes
        return lambda *args, **kwargs: None
    return functools.partial(_bind, name, signature)


def _bind(name: str, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        problem, names = str(error), [key for key in signature.parameters if key != "self"]
        if unknown := [key for key in kwargs if key not in names]:  # Python looks for missing arguments first
            problem = f"it has no argument '{unknown[0]}'"
        raise CallDoesNotBind(call=name, problem=problem, arguments=names) from None


def check(call: str, argument: str, value: Any, name: str = "") -> None:
    """Raise ``ArgumentMeansNothing`` unless a value is what an argument of this ``name``, which is ``argument`` by
    default, takes."""
    what, test = _TAKEN.get(name or argument, ("anything", object))
    expect(call, argument, value, what, when=isinstance(value, test) if isinstance(test, type | tuple) else test(value))


def expect(call: str, argument: str, value: Any, what: str, *, when: bool) -> None:
    """Raise ``ArgumentMeansNothing``, which names ``what`` the argument takes, unless ``when``."""
    if not when:
        texts = {"reason": f"is not {what}", "advice": f"Pass {what}."}
        raise ArgumentMeansNothing(call=call, argument=argument, value=_shown(value), **texts)


def refused(call: str, argument: str, value: object, row: str = "", **details: object) -> NxdtError:
    """Return the error of a value that has no meaning here, for the reason in the ``row`` of ``refusals.csv``, which is
    that of ``argument`` by default, and whose placeholders are ``details``."""
    reason, advice = reason_and_advice(call, row or argument, **details)
    return ArgumentMeansNothing(call=call, argument=argument, value=str(value), reason=reason, advice=advice)


def reason_and_advice(call: str, argument: str, **details: object) -> tuple[str, str]:
    """Return the texts of a row of ``refusals.csv``, with ``details`` in place of its placeholders."""
    reason, advice = _REFUSALS.get((call, argument)) or _REFUSALS["*", argument]
    return reason.format(**details), advice.format(**details)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"<{type(value).__name__}>"
