"""Arguments that a function or layer of NxD Core's API does not have: a code instead of a bare ``TypeError``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, final

from nxdt_core.errors import NxdtError
from nxdt_plugin_nxd_core.errors import ArgumentMeansNothing, CallDoesNotBind

__all__ = ["TakenArguments", "binds", "expect", "refused"]

_log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def binds(
    **no_effect: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator of functions that refuse unknown arguments and require those without a default.

    Args:
        no_effect: arguments that are accepted, each with the reason why it has no effect. The first call that gives
            such an argument a value other than its default logs a warning.

    Raises:
        CallDoesNotBind: when the function is called: arguments that are missing, unknown or too many.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")
        skipped = int("." in function.__qualname__)  # self
        noted: set[str] = set()

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                parameters = [*signature.parameters.values()][skipped:]
                raise _unbound(name, parameters, len(args) - skipped, kwargs, error) from None
            for argument in no_effect.keys() & given.keys() - noted:
                if given[argument] != signature.parameters[argument].default:
                    noted.add(argument)
                    _log.warning("%s: %s has no effect: %s", name, argument, no_effect[argument])
            return function(*args, **kwargs)

        return call

    return decorate


@final
class TakenArguments:
    """The arguments that a caller's function takes; the function itself is not kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__qualname__", type(function).__name__)
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # of some built-in classes
            self._signature = None

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that the function accepts these arguments.

        Raises:
            CallDoesNotBind: it does not accept them.
        """
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _unbound(self._name, [*self._signature.parameters.values()], len(args), kwargs, error) from None


def _unbound(
    name: str, parameters: Sequence[inspect.Parameter], given: int, kwargs: Mapping[str, Any], error: TypeError
) -> NxdtError:
    known = [each.name for each in parameters]
    unknown = [each for each in kwargs if each not in known]
    missing = [
        each.name
        for number, each in enumerate(parameters)
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        if number >= given and each.name not in kwargs
    ]
    if unknown:
        problem = f"it has no argument '{unknown[0]}'"
    elif missing:
        problem = f"the argument '{missing[0]}' is missing"
    else:
        problem = str(error)
    return CallDoesNotBind(call=name, problem=problem, arguments=known)


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
