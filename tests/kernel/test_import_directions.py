"""Imports point one way (docs: architecture): a layer imports those below it, a plugin imports the core alone.

Imports inside functions and under ``TYPE_CHECKING`` count as well: what they name is still depended on.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "nxdt_core"

LAYERS = (
    {"_version", "capabilities", "visible_text"},
    {"errors"},
    {"api", "compile_counts", "devices", "mounts", "regular_files", "torch_versions"},
    {"progress", "protocols"},
    {"file_lock", "kernel"},
    {"config"},
    {"nn"},
    {"distributed", "engines"},
    {"checkpoint", "data"},
    {"launch"},
    {"training"},
    {"inference"},
    {"cli"},
    {"__main__"},
)
"""From the bottom; the parts of one layer do not import each other."""

LIKE_PLUGINS = {"builtins", "parallel", "testing"}
"""Built-in components, the torch engine and the kits: they import the core, which names them only as text."""

HEAVY = {"torch", "numpy", "pytorch_lightning", "lightning", "transformers", "tokenizers", "safetensors"}
TORCH_FREE = ("api.py", "errors", "kernel", "config", "protocols", "cli")


def level(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or imported == "_version":
        return True
    if importer in LIKE_PLUGINS:
        return imported not in {"cli", "__main__"}
    return imported not in LIKE_PLUGINS and level(imported) < level(importer)


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and full module name of every import of a file; ``from a import b`` gives ``a.b``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def runs_at_import(path: Path) -> list[tuple[int, str]]:
    """As :func:`imports`, of the module's body alone: what importing the file imports."""
    body = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [
        (node.lineno, name)
        for node in body
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    ]


def part_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def core_files() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path != CORE / "__init__.py")


def test_every_part_of_the_core_has_its_place():
    parts = {part_of(path) for path in core_files()}
    assert parts <= set().union(LIKE_PLUGINS, *LAYERS)


def test_the_layers_of_the_core_import_downwards():
    wrong = []
    for path in core_files():
        for line, name in imports(path):
            top, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if top == "nxdt_core" and imported != "__version__" and not allowed(part_of(path), imported):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_the_core_imports_no_plugin():
    named = [(path, line, name) for path in core_files() for line, name in imports(path)]
    assert [f"{path}:{line}" for path, line, name in named if name.startswith("nxdt_plugin")] == []


@pytest.mark.parametrize("part", TORCH_FREE)
def test_a_torch_free_layer_imports_nothing_heavy_when_it_is_imported(part):
    files = [path for path in core_files() if path.relative_to(CORE).parts[0] == part]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in runs_at_import(path)
        if name.partition(".")[0] in HEAVY or name == "nxdt_core.devices"
    ]
    assert files
    assert wrong == []


def plugin_packages() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("plugins/*/*/src/nxdt_plugin_*/__init__.py"))


@pytest.mark.parametrize("package", plugin_packages(), ids=lambda package: package.name)
def test_a_plugin_imports_the_core_and_no_other_plugin(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(package.rglob("*.py"))
        for line, name in imports(path)
        if name.startswith("nxdt_plugin") and name.partition(".")[0] != package.name
    ]
    assert wrong == []


def test_the_torch_engine_is_imported_by_itself_alone():
    """Whatever else needs an engine has the one that the configuration selects."""
    outside = [path for path in core_files() if part_of(path) != "parallel"]
    outside += [path for package in plugin_packages() for path in package.rglob("*.py")]
    named = [(path, line, name) for path in outside for line, name in imports(path)]
    assert len(outside) > 400
    assert [f"{p}:{line} imports {name}" for p, line, name in named if name.startswith("nxdt_core.parallel")] == []


@pytest.mark.parametrize("package", plugin_packages(), ids=lambda package: package.name)
def test_an_entry_module_imports_the_api_alone(package):
    modules = {name for _, name in runs_at_import(package / "__init__.py")}
    import sys

    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} <= {"nxdt_core.api"}
