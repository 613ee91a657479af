"""What pages of the documentation show of the code: files, those of ``nxdt plugins new``, kits and protocols.

A page below ``docs`` is written by hand. Some of its lines are replaced while the site is built. They say what is meant
where the page is read without that:

* ``*The file [PATH](LINK).*``: a file of this repository;
* ``*The file `PATH` of the new plugin.*``: a file that ``nxdt plugins new SHORT my-SHORT`` writes;
* ``*The requirements: the tests of the kit by name.*``: what the kit of the kind tests;
* ``*The source of the base class, in `PATH`.*``: that of the kind; ``protocol`` where the target is a function.
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

__all__ = ["FOLDER", "expanded", "protocol_source", "repository", "requirements"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "kinds"
"""Folder of the pages below ``docs``."""
_MARK = re.compile(
    r"^\*The (?:file \[(?P<ours>\S+)\]\(\S+\)|file `(?P<new>\S+)` of the new plugin"
    r"|(?P<kit>requirements: the tests of the kit by name)|source of the (?:protocol|base class), in `\S+`)\.\*$",
    re.MULTILINE,
)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def expanded(page: str, markdown: str) -> str:
    """Return the Markdown of a page with its marks replaced.

    Args:
        page: name of the page, which is that of the kind.
        markdown: what is written in it.
    """

    def replace(found: re.Match[str]) -> str:
        if found["ours"]:
            return _block((ROOT / found["ours"]).read_text(), _LANGUAGES[Path(found["ours"]).suffix])
        if found["new"]:
            return (
                f"`{found['new']}`:\n\n{_block(repository(page)[found['new']], _LANGUAGES[Path(found['new']).suffix])}"
            )
        if found["kit"]:
            return "\n".join(f"- {each}" for each in requirements(page))
        return _block(protocol_source(page), "python")

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
