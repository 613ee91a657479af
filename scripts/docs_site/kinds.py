"""What pages of the documentation show of the code: files, those of ``nxdt plugins new``, kits and protocols.

A page below ``docs`` is written by hand. Some of its lines are replaced while the site is built. They say what is meant
where the page is read without that:

* ``*The file [PATH](LINK).*``: a file of this repository;
* ``*The file `PATH` of the new plugin.*``: a file that ``nxdt plugins new SHORT my-SHORT`` writes;
* ``*The requirements: the tests of the kit by name.*``: what the kit of the kind tests;
* ``*The source of the protocol, in `PATH`.*``: that of the kind.
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
_MARK = re.compile(
    r"^\*The (?:file \[(?P<ours>\S+)\]\(\S+\)|file `(?P<new>\S+)` of the new plugin"
    r"|(?P<kit>requirements: the tests of the kit by name)|source of the protocol, in `\S+`)\.\*$",
    re.MULTILINE,
)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def page_of(kind: str) -> str:
    """Return the name of a kind's page, without a suffix: the short name of the kind."""
    return next((short for short, full in SHORT_NAMES.items() if full == kind), kind)


def expanded(page: str, markdown: str) -> str:
    """Return the Markdown of a page with its marks replaced.

    Args:
        page: name of the page, such as ``model`` for the kind of models.
        markdown: what is written in it.
    """
    kind = SHORT_NAMES.get(page, page)

    def replace(found: re.Match[str]) -> str:
        if found["ours"]:
            return _block((ROOT / found["ours"]).read_text(), _LANGUAGES[Path(found["ours"]).suffix])
        if found["new"]:
            return (
                f"`{found['new']}`:\n\n{_block(repository(page)[found['new']], _LANGUAGES[Path(found['new']).suffix])}"
            )
        if found["kit"]:
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
    path = ROOT / "testing" / "src" / "nxdt_testing" / f"{_CONTRACTS.get(kind, kind)}_contract.py"
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
