"""Write the code that pages of the documentation show: files, those of ``nxdt plugins new``, kits and protocols.

    python -m scripts.docs_site.kinds    writes the pages; ``make offers`` calls it, and a test fails where one is old

Each is between ``<!-- NAME -->`` and ``<!-- end -->`` in a page that is otherwise written by hand. The names are:

* ``the file PATH``: a file of this repository;
* ``the file PATH of the new plugin``: a file that ``nxdt plugins new SHORT my-SHORT`` writes;
* ``the requirements``: what the kit of the kind tests, by the names of its tests;
* ``the source``: that of the base class or protocol of the kind.
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
from nxdt_core.scaffold.repository import write_repository

__all__ = ["FOLDER", "PAGES", "expanded", "protocol_source", "repository", "requirements"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "kinds"
"""Folder of the pages below ``docs``."""
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "\n<!-- end -->" in path.read_text()]
"""Pages that show code."""
_MARK = re.compile(
    r"^<!-- (?P<name>the (?:file (?P<path>\S+)(?P<new> of the new plugin)?|(?P<kit>requirements)|source)) -->\n"
    r".*?^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def expanded(page: str, markdown: str) -> str:
    """Return the Markdown of a page with its code written again.

    Args:
        page: name of the page, which is that of the kind.
        markdown: what the page has.
    """

    def replace(found: re.Match[str]) -> str:
        path, name = found["path"], found["name"]
        if path and found["new"]:
            text = f"`{path}`:\n\n{_block(repository(page)[path], _LANGUAGES[Path(path).suffix])}"
        elif path:
            text = _block((ROOT / path).read_text(), _LANGUAGES[Path(path).suffix])
        elif found["kit"]:
            text = "\n".join(f"- {requirement}" for requirement in requirements(page))
        else:
            text = _block(protocol_source(page), "python")
        return f"<!-- {name} -->\n\n{text}\n\n<!-- end -->"

    return _MARK.sub(replace, markdown)


@cache
def repository(page: str) -> dict[str, str]:
    """Return the files of a new plugin of the page's kind: text by path."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / f"my-{page}"
        return {str(path): (directory / path).read_text() for path in write_repository(page, directory.name, directory)}


def requirements(kind: str) -> list[str]:
    """Return what the kit of a kind tests, a line for each test; nothing where the kind has no kit."""
    folder = ROOT / "testing" / "src" / "nxdt_testing"
    parts = sorted(folder.glob(f"{kind}_*.py"), key=lambda path: (path.stem != f"{kind}_contract", path.stem))
    nodes = [node for path in parts for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("test_").replace("_", " ") for name in names if name.startswith("test_")]


def protocol_source(kind: str) -> str:
    """Return the source of the protocol that components of a kind have."""
    module, _, name = next(each.protocol for each in KINDS if each.name == kind).partition(":")
    return inspect.getsource(getattr(import_module(module), name)).rstrip()


def _block(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(expanded(each.stem, each.read_text()))
