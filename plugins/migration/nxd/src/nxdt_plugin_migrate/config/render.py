"""A document as YAML: sections nested again, comments where they were, interpolations pointed to where keys are now."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from nxdt_plugin_migrate.config.document import Document, Setting

TO_SET = "???"
"""OmegaConf's mark of a value that must be given."""

_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
"""An interpolation of another key: ``${section.key}`` or ``${.key}``. One of a resolver has a colon."""


def render(document: Document, head: tuple[str, ...], tail: tuple[str, ...]) -> str:
    """Return the YAML text.

    Args:
        document: The settings.
        head: Comment lines above them.
        tail: Comment lines below them.
    """
    tree: dict[str, Any] = {}
    for path, setting in document.settings.items():
        *sections, name = path.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = setting
    lines = [*_comments(head, ""), *_lines(tree, "", document), *(("", *_comments(tail, "")) if tail else ())]
    return "\n".join(lines) + "\n"


def _lines(tree: dict[str, Any], path: str, document: Document) -> list[str]:
    depth = path.count(".") + 1 if path else 0
    indent = "  " * depth
    lines: list[str] = []
    apart = False
    for name, child in tree.items():
        here = f"{path}.{name}" if path else name
        if isinstance(child, Setting):
            text = f"{indent}{dump(name)}: {_text(child, here, document)}"
            lines += [""] if apart else []
            apart = False
            lines += [*_comments(child.above, indent), f"{text} {child.beside}".rstrip()]
        else:
            apart = depth == 0
            lines += [""] if apart else []
            lines += [*_comments(document.headings.get(here, ()), indent), f"{indent}{dump(name)}:"]
            lines += _lines(child, here, document)
    return lines


def _comments(lines: tuple[str, ...], indent: str) -> list[str]:
    return [f"{indent}{line if line.startswith('#') else f'# {line}'}".rstrip() for line in lines]


def _text(setting: Setting, path: str, document: Document) -> str:
    if setting.text is None:
        return dump(setting.value)
    if "${" not in setting.text:
        return setting.text
    lost = False

    def pointed(match: re.Match[str]) -> str:
        nonlocal lost
        # One dot is the section that contains the interpolation.
        around = setting.source.split(".")[: -len(match[1])] if match[1] else []
        target = ".".join([*around, match[2]])
        now = document.moved.get(target, target)
        lost = lost or not document.has(now)
        neighbours = now.rpartition(".")[0] == path.rpartition(".")[0]
        return f"${{.{now.rpartition('.')[2]}}}" if match[1] and neighbours else f"${{{now}}}"

    text = _REFERENCE.sub(pointed, setting.text)
    return dump(setting.value) if lost else text


def dump(value: object) -> str:
    """Return one value on one line."""
    if value == TO_SET:  # as OmegaConf's users write it; the dumper would quote it
        return TO_SET
    return _dump_scalar(value) if isinstance(value, str | int | float | None) else _dump(value)


def _dump(value: object) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


@lru_cache(maxsize=4096, typed=True)  # a document is rendered until nothing has to go: three times or more
def _dump_scalar(value: str | float | None) -> str:
    return _dump(value)
