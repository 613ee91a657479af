"""The public Python names with their signatures, as lines of text.

    python scripts/public_api.py            say what differs from tests/api/public_api.txt; exit status 1 where it does
    python scripts/public_api.py --write    write the file; ``make api`` calls it

The tables of ``docs/public-api.md`` say which names are public. Signatures are read from the source, which is not
imported, so that the lines are equal under every version of Python and torch.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "api" / "public_api.txt"
PAGE = ROOT / "docs" / "public-api.md"

__all__ = ["GOLDEN", "definition", "difference", "public_names", "source_of", "surface"]


def public_names() -> dict[str, list[str]]:
    """Return the public names of each module, in the order of the page."""
    rows = re.findall(r"^\| `(nxdt_[\w.]+)` \| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def source_of(module: str) -> Path:
    """Return the file of a module of the core or of nxdt-testing.

    Raises:
        FileNotFoundError: there is none.
    """
    root = ROOT if module.startswith("nxdt_core") else ROOT / "testing" / "src"
    path = root.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    raise FileNotFoundError(module)


def surface() -> list[str]:
    """Return a line for each public name.

    Raises:
        ValueError: a module does not export a name.
    """
    return [
        f"{module}.{name}{_signature(definition(module, name))}"
        for module, names in public_names().items()
        for name in names
    ]


def difference() -> str:
    """Return what differs from the file, as a diff; empty if nothing does."""
    lines = difflib.unified_diff(GOLDEN.read_text(encoding="utf-8").splitlines(), surface(), "file", "source", n=0)
    return "\n".join(list(lines)[2:])


@cache
def _bound(module: str) -> dict[str, ast.stmt]:
    """Return the statements that bind names at the top level of a module or below ``if TYPE_CHECKING``."""
    found: dict[str, ast.stmt] = {}
    body = ast.parse(source_of(module).read_text(encoding="utf-8")).body
    for node in [*body, *(part for block in body if isinstance(block, ast.If) for part in block.body)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def definition(module: str, name: str) -> ast.stmt:
    """Return the statement that defines what a module exports under a name, in whichever module of nxdt it is.

    Raises:
        ValueError: the module does not export the name.
    """
    bound = _bound(module)
    node, exported = bound.get(name), bound.get("__all__")
    if node is None or (isinstance(exported, ast.Assign) and name not in ast.literal_eval(exported.value)):
        raise ValueError(f"{module} does not export {name}")
    from_nxdt = isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("nxdt_")
    return definition(node.module, name) if from_nxdt else node


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else None}"
    if not isinstance(node, ast.ClassDef):
        return ""
    fields, methods = [], []
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            fields.append(ast.unparse(part))
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            fields.append(ast.unparse(part.args).removeprefix("self, "))
        elif isinstance(part, ast.FunctionDef) and not part.name.startswith(("_", "test_")):
            methods.append(f".{part.name}({ast.unparse(part.args)})".replace("(self, ", "(").replace("(self)", "()"))
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return " ".join([f" class({bases})", *([f"[{'; '.join(fields)}]"] if fields else []), *methods])


def main(*arguments: str) -> int:
    """Write the file, or print what differs from it."""
    if arguments == ("--write",):
        GOLDEN.write_text("\n".join(surface()) + "\n", encoding="utf-8")
        return 0
    found = difference()
    print(found or "the public API is that of tests/api/public_api.txt")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
