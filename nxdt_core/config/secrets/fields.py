"""Fields that a component's section marks as secret: what is written there literally is masked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from nxdt_core.config.annotations import Secret
from nxdt_core.config.fields.keys import LISTS, TABLES, is_model, keys_of
from nxdt_core.config.sources.node import MASK, Node, replaced

__all__ = ["Path", "dotted", "find_node", "leaf_places", "mask_fields"]

Path = tuple[str | int, ...]
"""Keys and list indices from the root."""


def mask_fields(tree: Node, sections: Iterable[tuple[Path, type]]) -> Node:
    """Return the tree with a mask for each literal value of a secret field.

    Args:
        tree: with interpolations resolved.
        sections: where each section has its keys.
    """
    for path, cls in sections:
        node = find_node(tree, path)
        if node is not None and isinstance(node.value, dict):
            tree = replaced(tree, path, _section(node, cls))
    return tree


def find_node(tree: Node, path: Path) -> Node | None:
    """Return the node at keys and list indices, or None."""
    node = tree
    for part in path:
        value: Any = node.value
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if not inside:
            return None
        node = value[part]
    return node


def _section(node: Node, cls: type) -> Node:
    keys = keys_of(cls)
    masked = {
        name: child
        if name not in keys
        else _section(child, section)
        if (section := keys[name].section) is not None and isinstance(child.value, dict)
        else _value(child, keys[name].annotation)
        for name, child in node.children.items()
    }
    return Node(masked, node.origin, node.shown)


def _value(node: Node, annotation: Any) -> Node:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        secret = any(isinstance(mark, Secret) for mark in annotation.__metadata__)
        return _masked(node) if secret else _value(node, annotation.__origin__)
    if origin in (Union, UnionType):
        for member in arguments:
            node = _value(node, member)
        return node
    if origin in LISTS and isinstance(node.value, list) and arguments:
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        shapes = arguments if fixed else arguments[:1] * len(node.value)
        items = [_value(item, each) for item, each in zip(node.value, shapes, strict=False)]
        return Node([*items, *node.value[len(items) :]], node.origin, node.shown)
    if origin in TABLES and len(arguments) == 2:
        return _each(node, lambda child: _value(child, arguments[1]))
    if is_model(annotation) and isinstance(node.value, dict):
        return _section(node, annotation)
    return node


def _masked(node: Node) -> Node:
    if isinstance(node.value, (dict, list)):
        return _each(node, _masked)
    literal = node.shown is None and node.origin.kind != "default" and node.value not in (None, "")
    return Node(node.value, node.origin, MASK) if literal else node


def _each(node: Node, change: Callable[[Node], Node]) -> Node:
    value: Any = node.value
    if isinstance(value, dict):
        value = {key: change(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [change(child) for child in value]
    return Node(value, node.origin, node.shown)


def leaf_places(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield each scalar below a node with its place."""
    children: Any = node.value
    if not isinstance(children, (dict, list)):
        yield path, node
        return
    for part, child in children.items() if isinstance(children, dict) else enumerate(children):
        yield from leaf_places(child, (*path, part))


def dotted(path: Path) -> str:
    """Return a place as messages name it: ``exp_manager.loggers[0].token``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
