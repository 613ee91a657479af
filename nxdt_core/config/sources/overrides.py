"""``trainer.max_steps=50`` on the command line: each argument becomes a value with that origin."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nxdt_core.config.sources.node import Node, Origin, merge
from nxdt_core.config.sources.yaml_text import parse_yaml
from nxdt_core.errors.configuration import BadOverride, ConfigProblem, YamlSyntax

__all__ = ["COMMAND_LINE", "apply_overrides", "override_node"]

COMMAND_LINE = Origin(kind="override", where="command line")

_PATH = re.compile(r"[^\s.=\[\]{}]+(\.[^\s.=\[\]{}]+)*")


def apply_overrides(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with each ``key.path=value`` set, later ones over earlier ones; values are read as YAML."""
    problems: list[ConfigProblem] = []
    for text in overrides:
        found = override_node(text)
        if isinstance(found, ConfigProblem):
            problems.append(found)
        else:
            tree = merge(tree, found)
    return tree, problems


def override_node(text: str) -> Node | ConfigProblem:
    """Return the tree that one override sets, or what is wrong with it."""
    path, equals, value = text.partition("=")
    if not equals:
        return _bad(text, "it has no '='")
    if not _PATH.fullmatch(path):
        return _bad(text, f"{path!r} is not a key path")
    document, problems = parse_yaml(f"value: {value}", COMMAND_LINE.where)
    if problems or "value" not in document.children:
        return _bad(f"{path}=…", _reason(problems))  # the value may hold a secret
    return Node({}, COMMAND_LINE).set(path, _here(document.children["value"]))


def _here(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _here(child) for key, child in node.value.items()}, COMMAND_LINE)
    if isinstance(node.value, list):
        return Node([_here(child) for child in node.value], COMMAND_LINE)
    return Node(node.value, COMMAND_LINE)


def _reason(problems: list[ConfigProblem]) -> str:
    if not problems:
        return "the value is empty"
    problem = problems[0]
    if isinstance(problem, YamlSyntax):
        return f"the value is not valid YAML: {problem.reason}"
    return f"the value cannot be used: {problem.what().rstrip('.')}"


def _bad(text: str, reason: str) -> ConfigProblem:
    return BadOverride(place=COMMAND_LINE.where, key="", text=text, reason=reason)
