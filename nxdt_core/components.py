"""The class that a component's record names, checked to inherit from the base class of its kind."""

from __future__ import annotations

from typing import TypeVar

from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.kernel.registry import RegisteredComponent

__all__ = ["class_of", "unusable"]

T = TypeVar("T")


def class_of(component: RegisteredComponent, base: type[T]) -> type[T]:
    """Return the class that ``component`` names.

    The base class has the defaults of what is optional, so that a class without it is refused.

    Raises:
        ComponentUnusable: it cannot be imported, does not inherit from ``base``, or lacks a method of it.
    """
    found, name = component.load_target(), f"{base.__module__}.{base.__qualname__}"
    if not (isinstance(found, type) and issubclass(found, base)):
        reason = f"it does not inherit from {name}"
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        reason = f"it lacks {', '.join(missing)} of {name}"
    else:
        return found
    raise unusable(component, reason)


def unusable(component: RegisteredComponent, reason: str) -> ComponentUnusable:
    """Return the error about the class that ``component`` names, which is not as the base class of its kind says."""
    record = component.record
    return ComponentUnusable(
        kind=component.kind,
        name=record.name,
        plugin=component.plugin,
        dist=component.dist,
        field="target",
        reference=record.target,
        reason=reason,
    )
