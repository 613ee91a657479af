"""Documentation of a section's keys: strings below the fields of its model, or ``Field(description=…)``.

Strings below fields are not kept at run time, so the class's source is parsed; only the commands that print
documentation do that. Pydantic's ``use_attribute_docstrings`` does so for every class that is imported, which takes
2 ms each.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from nxdt_core.config.fields.keys import keys_of

__all__ = ["class_doc", "field_docs"]


def field_docs(cls: Any) -> dict[str, str]:
    """Return one paragraph for each field that is documented; that of a subclass wins."""
    described = {name: info.description for name, info in cls.__pydantic_fields__.items()}
    found: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        found.update(_docs_of_module(klass.__module__).get(klass.__qualname__, {}))
    texts = {key.name: described.get(key.attribute) or found.get(key.attribute) for key in keys_of(cls).values()}
    return {name: " ".join(text.split()) for name, text in texts.items() if text}


def class_doc(cls: type) -> str:
    """Return the class's docstring; empty where it has none."""
    return inspect.cleandoc(cls.__doc__ or "")


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Class → field → text, for a module whose source can be had."""
    module = sys.modules.get(name)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError, SyntaxError):
        return {}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree is not None else []
    return {node.name: _docs_of_class(node) for node in classes}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = below.value.value
    return found
