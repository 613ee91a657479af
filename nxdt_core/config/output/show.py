"""A resolved configuration as YAML, with the origin of each value as a comment. The text can be loaded."""

from __future__ import annotations

from functools import lru_cache

from nxdt_core.config.resolved import ResolvedConfig
from nxdt_core.config.secrets.messages import Redaction
from nxdt_core.config.sources.node import Node, to_shown

__all__ = ["render_show"]

_COLUMN = 48
"""Where comments start, unless a value is longer."""


def render_show(resolved: ResolvedConfig, *, only_set: bool = False) -> str:
    """Return the YAML with ``# origin`` comments. ``only_set`` leaves out what is a default."""
    redact = Redaction(resolved.tree)
    lines = [f"# {resolved.source}, resolved"]
    lines += [f"# note: {note}" for note in resolved.notes]
    for key, node in resolved.tree.children.items():
        lines += _lines(key, node, 0, only_set, redact)
    return "\n".join(lines) + "\n"


def _lines(key: str, node: Node, depth: int, only_set: bool, redact: Redaction) -> list[str]:
    indent = "  " * depth
    if node.children:
        below = [
            line for name, child in node.children.items() for line in _lines(name, child, depth + 1, only_set, redact)
        ]
        return [f"{indent}{_name(key)}:", *below] if below else []
    if only_set and node.origin.kind == "default":
        return []
    text = f"{indent}{_name(key)}: {_scalar(to_shown(node))}"
    return [f"{text:<{_COLUMN}}  # {redact(str(node.origin))}"]


def _scalar(value: object) -> str:
    """One value in flow style on one line. Half of all values need no dumper, which takes 0.1 ms for each."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if type(value) is int else _dumped(value)


@lru_cache(maxsize=1024)
def _name(key: str) -> str:
    """One key, of which all configurations have the same."""
    return _dumped(key)


def _dumped(value: object) -> str:
    """The list around a value keeps the dumper from writing a document's end."""
    # Here, not above: the dumper's regular expressions cost 5 ms, which loading need not pay.
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
