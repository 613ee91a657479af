"""How a public name is deprecated: it works, and warns with what replaces it and the version in which it goes.

``scripts/public_api.py`` reads the calls from the source, so arguments are literal texts. A version is that of the
core, such as ``0.3``. A name goes two minor versions after ``since`` at the earliest, so that a plugin which is written
for one minor version works in the next.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

_C = TypeVar("_C", bound=Callable[..., Any])


class NxdtDeprecationWarning(DeprecationWarning):
    """A public name that goes in a later version. pytest shows it; ``python -W default`` does elsewhere."""


def deprecation_text(name: str, *, use: str, goes: str) -> str:
    """Return the sentences of every deprecation."""
    return f"{name} is deprecated and goes in nxdt-core {goes}. Use {use}."


def deprecated(*, use: str, since: str, goes: str) -> Callable[[_C], _C]:
    """Deprecate a function, a method or a class: each call or construction warns.

    Example::

        @deprecated(use="nxdt_core.models.norm.RMSNorm", since="0.2", goes="0.4")
        class Norm: ...
    """
    del since

    def mark(target: _C) -> _C:
        text = deprecation_text(f"{target.__module__}.{target.__qualname__}", use=use, goes=goes)
        marked: Any = target
        called = marked.__init__ if inspect.isclass(target) else target

        @functools.wraps(called)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, NxdtDeprecationWarning, stacklevel=2)
            return called(*args, **kwargs)

        if inspect.isclass(target):
            marked.__init__ = warning
        else:
            marked = warning
        marked.__deprecated__ = text
        return cast(_C, marked)

    return mark


def deprecated_module(name: str, *, use: str, since: str, goes: str) -> None:
    """Warn that a module has moved; called in the old one, below ``from new import *``."""
    del since
    warnings.warn(deprecation_text(name, use=use, goes=goes), NxdtDeprecationWarning, stacklevel=3)


def deprecated_name(name: str, *, use: str, since: str, goes: str) -> Any:
    """Return what replaces a name of a module and warn; called in the module's ``__getattr__``.

    Example::

        def __getattr__(name: str) -> object:
            if name == "Old":
                return deprecated_name("nxdt_core.api.Old", use="nxdt_core.api.New", since="0.2", goes="0.4")
            raise AttributeError(name)
    """
    del since
    warnings.warn(deprecation_text(name, use=use, goes=goes), NxdtDeprecationWarning, stacklevel=3)
    module, _, attribute = use.rpartition(".")
    return getattr(import_module(module), attribute)
