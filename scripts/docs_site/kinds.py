"""Pages of the documentation about each kind of component: the files of ``nxdt plugins new``, the kit, the protocol.

A page below ``docs/kinds`` is written by hand, with three marks on separate lines:

* ``[[file PATH]]``: a file of the repository that ``nxdt plugins new SHORT my-SHORT`` writes;
* ``[[requirements]]``: what the kit of the kind tests, from the names of its tests;
* ``[[protocol]]``: the source of the kind's protocol.
"""

from __future__ import annotations

import ast
import inspect
import re
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

from nxdt_core.api import KINDS
from nxdt_core.scaffold.repository import SHORT_NAMES, write_repository

__all__ = ["FOLDER", "expanded", "page_of", "protocol_source", "repository", "requirements"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "kinds"
"""Folder of the pages below ``docs``."""
_CONTRACTS = {"model_builder": "model", "dataloader": "dataset", "precision_policy": "precision"}
_CONTRACTS |= {"checkpoint_storage": "storage", "parallel_engine": "engine"}
"""Kind → beginning of the name of its kit's module, where it is not that of the kind."""
_MARK = re.compile(r"^\[\[(file|requirements|protocol)(?: (\S+))?\]\]$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def page_of(kind: str) -> str:
    """Return the name of a kind's page, without a suffix: the short name of the kind."""
    return next((short for short, full in SHORT_NAMES.items() if full == kind), kind)


def expanded(page: str, markdown: str) -> str:
    """Return the Markdown of a page with its marks replaced.

    Args:
        page: name of the page, such as ``model``.
        markdown: what is written in it.
    """
    kind = SHORT_NAMES.get(page, page)

    def replace(found: re.Match[str]) -> str:
        if found[1] == "file":
            path = found[2]
            return f"`{path}`:\n\n{_block(repository(page)[path], _LANGUAGES[Path(path).suffix])}"
        if found[1] == "requirements":
            return "\n".join(f"- {each}" for each in requirements(kind))
        return _block(protocol_source(kind), "python")

    return _MARK.sub(replace, markdown)


@cache
def repository(page: str) -> dict[str, str]:
    """Return the files of a new plugin of the page's kind: text by path."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / f"my-{page}"
        return {str(path): (directory / path).read_text() for path in write_repository(page, directory.name, directory)}


def requirements(kind: str) -> list[str]:
    """Return what the kit of a kind tests, a line for each test; nothing where the kind has no kit."""
    path = ROOT / "nxdt_core" / "testing" / f"{_CONTRACTS.get(kind, kind)}_contract.py"
    if not path.exists():
        return []
    tree = ast.parse(path.read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("test_").replace("_", " ") for name in names if name.startswith("test_")]


def protocol_source(kind: str) -> str:
    """Return the source of the protocol that components of a kind have."""
    module, _, name = next(each.protocol for each in KINDS if each.name == kind).partition(":")
    return inspect.getsource(getattr(import_module(module), name)).rstrip()


def _block(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```"
