"""State that is not a tensor, as JSON that gives back exactly what was put in. Torch-free.

``None``, ``bool``, ``int``, ``float``, ``str``, lists and dicts with string keys are themselves. What JSON lacks is
tagged, ``{"$": kind, …}``: tuples, infinities and NaN, dicts with integer keys (or with the key ``$``), and tensors,
which are in a shard and are referred to by name. Anything else is refused with its place in the tree named: a class
that would have to be constructed is a class that a file could make construct itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.errors.checkpoints import UnsavableState

_TAG = "$"
_DEEPEST = 200
"""Levels of nesting; json and this module recurse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value of the configuration or of a rank's state that is not the same, or that one side lacks."""

    where: str
    """Place of the difference: ``config``, or the file of the state."""
    path: str
    """Keys and indices, joined by dots."""
    values: tuple[Any, Any]
    """Values of the first and second side, JSON-able; None where a side lacks it."""
    only_in: int | None = None
    """The side, 0 or 1, that alone has it."""


def encode_tree(
    tree: object, *, at: str = "", put_tensor: Callable[[str, object], str | None] = lambda at, value: None
) -> Any:
    """Return the JSON-able form of ``tree``.

    Args:
        tree: the value to encode.
        at: place of the value, for messages and for names of tensors; each level adds ``/`` and its key or index.
        put_tensor: called with the place and value of a leaf that is not JSON; stores a tensor and returns the name
            to refer to it, or None where the value is not a tensor.

    Raises:
        UnsavableState: a leaf is neither JSON nor a tensor; the ``where`` of the error is its place.
    """

    def encode(value: Any, at: str, depth: int) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        if depth == _DEEPEST:
            reason = f"it is nested deeper than {_DEEPEST} levels, perhaps within itself"
            raise UnsavableState(where=at or "/", reason=reason)
        if type(value) in (list, tuple):
            items = [encode(item, f"{at}/{i}", depth + 1) for i, item in enumerate(value)]
            return items if type(value) is list else {_TAG: "tuple", "items": items}
        if isinstance(value, Mapping):
            pairs = []
            for key, item in value.items():
                if type(key) not in (str, int):
                    reason = f"it has the key {key!r}, neither a string nor an integer"
                    raise UnsavableState(where=at or "/", reason=reason)
                # Escaped as in RFC 6901, so that two places never have one name.
                pairs.append([key, encode(item, f"{at}/{str(key).replace('~', '~0').replace('/', '~1')}", depth + 1)])
            plain = all(type(key) is str for key in value) and _TAG not in value
            return dict(pairs) if plain else {_TAG: "dict", "items": pairs}
        name = put_tensor(at, value)
        if name is None:
            kind = type(value)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise UnsavableState(where=at or "/", reason=f"it is a {module}{kind.__qualname__}")
        return {_TAG: "tensor", "name": name}

    return encode(tree, at, 0)


def decode_tree(form: Any, tensors: Mapping[str, Any] | None = None) -> Any:
    """Return the inverse of :func:`encode_tree`; ``tensors`` by the names that ``put_tensor`` gave.

    Raises:
        ValueError: ``form`` is not what :func:`encode_tree` returns.
    """
    try:
        return _decode(form, tensors or {})
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"malformed state tree: {error!r}") from error


def compare_trees(where: str, first: Any, second: Any) -> Iterator[ValueDifference]:
    """Yield the values in which two trees differ; ``where`` names both."""
    leaves = dict(_leaves(first)), dict(_leaves(second))
    for path in {**leaves[0], **leaves[1]}:
        values = leaves[0].get(path), leaves[1].get(path)
        lacking = [side for side in (0, 1) if path not in leaves[side]]
        if lacking or type(values[0]) is not type(values[1]) or values[0] != values[1]:
            only_in = 1 - lacking[0] if lacking else None
            yield ValueDifference(where=where, path=path, values=values, only_in=only_in)


def _leaves(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a tree that is neither a mapping nor a list of such; empty ones are leaves."""
    if isinstance(tree, Mapping) and tree:
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in tree):
        children = enumerate(tree)
    else:
        yield at, tree
        return
    for key, child in children:
        yield from _leaves(child, f"{at}.{key}" if at else str(key))


def _decode(form: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(form, list):
        return [_decode(item, tensors) for item in form]
    if not isinstance(form, dict):
        return form
    match form.get(_TAG):
        case None:
            return {key: _decode(item, tensors) for key, item in form.items()}
        case "tuple":
            return tuple(_decode(item, tensors) for item in form["items"])
        case "float":
            return float(form["value"])
        case "dict":
            return {key: _decode(item, tensors) for key, item in form["items"]}
        case "tensor":
            return tensors[form["name"]]
        case other:
            raise ValueError(f"unknown tag {other!r}")
