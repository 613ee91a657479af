"""Which interpolations read the environment: their values are used, and their references are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nxdt_core.config.sources.node import MASK, Node

__all__ = ["from_environment", "recording", "variables_of"]

_READ: ContextVar[list[str] | None] = ContextVar("variables that were read", default=None)
_VARIABLE = re.compile(r"oc\.env\s*:\s*([^\s,{}$]+)")
_REFERENCE = re.compile(r"\$\{(\w[\w.\[\]]*)\}")
"""An interpolation that is nothing but the absolute path of a key."""


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note the names of variables that OmegaConf reads during the block, however deep in an interpolation."""
    # Here, not above: OmegaConf is needed by few configurations.
    from omegaconf import OmegaConf

    OmegaConf.register_resolver("oc.env", _read, replace=True, annotation_validation="off")
    names: list[str] = []
    token = _READ.set(names)
    try:
        yield names
    finally:
        _READ.reset(token)


def _read(*arguments: Any) -> Any:
    from omegaconf.resolvers import oc

    names = _READ.get()
    if names is not None:
        names.append(str(arguments[0]))
    return oc.env(*arguments)


def variables_of(text: str) -> list[str]:
    """Return the variables that an interpolation names by itself."""
    return _VARIABLE.findall(text)


def from_environment(node: Node, text: str) -> Node:
    """Return the node of what ``text`` was resolved to, shown as ``text``.

    Values below a mapping or list are shown as a reference to the same place, where ``text`` is the path of a key;
    the sections that are taken apart later show that.
    """
    target = _REFERENCE.fullmatch(text)
    return _shown(node, text, target[1] if target else None)


def _shown(node: Node, text: str, target: str | None) -> Node:
    def below(part: str) -> tuple[str, str | None]:
        place = f"{target}{part}" if target and re.fullmatch(r"[.\[\]\w]+", part) else None
        return (f"${{{place}}}" if place else MASK), place

    value: Any = node.value
    if isinstance(value, dict):
        value = {key: _shown(child, *below(f".{key}")) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_shown(child, *below(f"[{number}]")) for number, child in enumerate(value)]
    return Node(value, node.origin, text)
