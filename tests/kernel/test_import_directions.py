"""Imports point one way (docs: architecture): a layer imports those below it, a plugin the core and what it requires.

Imports inside functions and under ``TYPE_CHECKING`` count as well: what they name is still depended on.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

ROOT = Path(__file__).parents[2]
CORE = ROOT / "nxdt_core"

LAYERS = (
    {"_version", "system"},
    {"errors"},
    {"callback"},
    {"api"},
    {"protocols"},
    {"kernel", "scaffold"},
    {"config"},
    {"distributed"},
    {"models"},
    {"checkpoint", "data"},
    {"hf"},
    {"engine"},
    {"launch"},
    {"train"},
    {"run"},
    {"builtins"},
    {"cli"},
    {"__main__"},
)
"""From the bottom; the parts of one layer do not import each other."""

HEAVY = {"torch", "numpy", "pytorch_lightning", "lightning", "transformers", "tokenizers", "safetensors"}
NETWORK = {"pytorch_lightning", "lightning", "transformers", "tokenizers", "huggingface_hub", "requests", "httpx"}
WITH_TORCH = (
    "nxdt_core.distributed.devices",
    "nxdt_core.distributed.device_operations",
)
DECODERS = (
    "decoder_builder",
    "decoder_config",
    "huggingface",
    "rope_scaling",
)
TORCH_FREE = ("api.py", "errors", "kernel", "config", "protocols", "cli", *(f"models/{each}.py" for each in DECODERS))


def level(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or imported == "_version":
        return True
    return level(imported) < level(importer)


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and full module name of every import of a file; ``from a import b`` gives ``a.b``."""
    found = []
    for node, _ in import_statements(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def runs_at_import(path: Path) -> list[tuple[int, str]]:
    """As :func:`imports`, of the module's body alone: what importing the file imports."""
    return [
        (node.lineno, name)
        for node, in_body in import_statements(path)
        if in_body
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    ]


@cache
def import_statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return each import of a file, and whether it is in the module's body. All tests share what is parsed."""
    tree = ast.parse(path.read_text())
    body = {id(node) for node in tree.body}
    kinds = (ast.Import, ast.ImportFrom)
    return [(node, id(node) in body) for node in ast.walk(tree) if isinstance(node, kinds)]


def part_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def core_files() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path != CORE / "__init__.py")


def test_every_part_of_the_core_has_its_place():
    parts = {part_of(path) for path in core_files()}
    assert parts <= set().union(*LAYERS)


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
    assert [f"{path}:{line}" for path, line, name in named if name.startswith(("nxdt_plugin", "nxdt_testing"))] == []


def test_the_kits_import_no_command_and_no_plugin():
    named = [(path, line, name) for path in (ROOT / "testing/src").rglob("*.py") for line, name in imports(path)]
    assert len(named) > 100
    assert [f"{path}:{line}" for path, line, name in named if name.startswith(("nxdt_plugin", "nxdt_core.cli"))] == []


@pytest.mark.parametrize("part", TORCH_FREE)
def test_a_torch_free_layer_imports_nothing_heavy_when_it_is_imported(part):
    files = [path for path in core_files() if f"{path.relative_to(CORE).as_posix()}/".startswith(f"{part}/")]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in runs_at_import(path)
        if name.partition(".")[0] in HEAVY or name in WITH_TORCH
    ]
    assert files
    assert wrong == []


def plugin_packages() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("plugins/*/*/src/nxdt_plugin_*/__init__.py"))


@pytest.mark.parametrize("package", plugin_packages(), ids=lambda package: package.name)
def test_a_plugin_imports_the_core_and_no_plugin_that_it_does_not_require(package):
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())]
    known = {package.name, *(re.match(r"[\w-]+", line)[0].replace("-", "_") for line in required)}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(package.rglob("*.py"))
        for line, name in imports(path)
        if name.startswith("nxdt_plugin") and name.partition(".")[0] not in known
    ]
    assert wrong == []


def test_plugins_that_require_each_other_make_no_cycle():
    packages = {package.name: package for package in plugin_packages()}
    graph = {
        name: {each.partition(".")[0] for path in package.rglob("*.py") for _, each in imports(path)} & packages.keys()
        for name, package in packages.items()
    }
    assert "nxdt_plugin_lightning" in graph["nxdt_plugin_nxd_core"]
    assert cycle_in({name: imported - {name} for name, imported in graph.items()}) == []


BLOCKS = tuple(
    f"nxdt_core.engine.{name}"
    for name in (
        *("compile_cache", "expert", "loss", "optim.optimizer", "optim.state", "parameters"),
        *("pipeline.split", "recompute", "shape_errors", "weights"),
    )
)
"""What other engines share with the torch engine."""


def test_the_torch_engine_is_imported_by_itself_alone():
    """Whatever else needs an engine has the one that the configuration selects. Other engines share public blocks."""
    outside = [path for path in core_files() if part_of(path) != "engine"]
    outside += [path for package in plugin_packages() for path in package.rglob("*.py")]
    named = [(path, line, name) for path in outside for line, name in imports(path)]
    wrong = [each for each in named if each[2].startswith("nxdt_core.engine") and not is_block(each[2])]
    assert len(outside) > 300
    assert [f"{path}:{line} imports {name}" for path, line, name in wrong] == []


def is_block(name):
    return any(f"{name}.".startswith(f"{block}.") for block in BLOCKS)


@pytest.mark.parametrize("package", plugin_packages(), ids=lambda package: package.name)
def test_an_entry_module_imports_the_api_alone(package):
    modules = {name for _, name in runs_at_import(package / "__init__.py")}
    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} <= {"nxdt_core.api"}


def modules_of(package: Path) -> dict[str, Path]:
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return files


def import_graph(package: Path) -> dict[str, set[str]]:
    """Modules of a package that each module of it imports; a name that an ``__init__`` defines counts as that file."""
    files, graph = modules_of(package), {}
    for module, path in files.items():
        named = {name if name in files else name.rpartition(".")[0] for _, name in imports(path)}
        graph[module] = (named & files.keys()) - {module}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one cycle, each imported by the one after it; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def imported_with(*modules: str) -> set[str]:
    """Names of what importing modules of the core imports, those of other packages too."""
    files, found, waiting = modules_of(CORE), set(), set(modules)
    while waiting:
        module = waiting.pop()
        found.add(module)
        parts = module.split(".")
        named = {".".join(parts[:end]) for end in range(1, len(parts))}
        for node, in_body in import_statements(files[module]) if module in files else ():
            if in_body and isinstance(node, ast.ImportFrom):
                named |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif in_body:
                named |= {alias.name for alias in node.names}
        waiting |= named - found
    return found


def test_a_plan_imports_nothing_that_could_download():
    """Neither with the module nor with the engine that estimates, also where an import is needed for something else."""
    found = imported_with("nxdt_core.train.plan", "nxdt_core.engine.engine", "nxdt_core.engine.estimate.run")
    assert {"torch", "nxdt_core.engine.layout"} <= found
    assert not found & NETWORK


@pytest.mark.parametrize("package", [CORE, *plugin_packages()], ids=lambda package: package.name)
def test_no_modules_import_each_other(package):
    """Move what both need into a module below them, pass the object in, or name a component's target as text."""
    graph = import_graph(package)
    assert sum(len(imported) for imported in graph.values()) > 0
    assert cycle_in(graph) == []


def test_the_folders_of_a_package_import_in_one_direction():
    folders = {f"nxdt_core.{path.parents[1].name}.{path.parent.name}" for path in CORE.glob("*/*/__init__.py")}
    graph: dict[str, set[str]] = {folder: set() for folder in folders}
    for module, imported in import_graph(CORE).items():
        importer = ".".join(module.split(".")[:3])
        if importer in folders:
            graph[importer] |= {".".join(name.split(".")[:3]) for name in imported} & folders - {importer}
    assert "nxdt_core.checkpoint.format" in graph["nxdt_core.checkpoint.read"]
    for package in {folder.rpartition(".")[0] for folder in folders}:
        inside = {folder for folder in folders if folder.startswith(f"{package}.")}
        assert cycle_in({folder: graph[folder] & inside for folder in inside}) == [], package


def test_a_cycle_is_found_in_functions_under_type_checking_and_through_a_package(tmp_path):
    package = tmp_path / "pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from pkg.sub import name\n")
    (package / "sub" / "__init__.py").write_text("from pkg.sub.b import name\n")
    (package / "sub" / "b.py").write_text("if TYPE_CHECKING:\n    import pkg.a\n")
    assert set(cycle_in(import_graph(package))) == {"pkg.a", "pkg.sub", "pkg.sub.b"}


IN_TEXT = re.compile(r"from (nxdt_(?:core|plugin_\w+)[\w.]*) import \(?([\w, ]+)")


def test_imports_in_pages_and_in_code_that_tests_write_name_what_exists():
    """A module that moves takes them along; ``docs/decisions`` keeps the names of its time."""
    modules = {
        name: path.read_text() for package in [CORE, *plugin_packages()] for name, path in modules_of(package).items()
    }
    folders = ("docs", "tests", "plugins", "benchmarks", "examples", "nxdt_core")
    pages = [path for folder in folders for end in ("md", "py") for path in (ROOT / folder).rglob(f"*.{end}")]
    found, wrong = 0, []
    for path in [ROOT / "README.md", *pages]:
        for module, names in IN_TEXT.findall(
            "" if path.parent.name == "decisions" else path.read_text(errors="replace")
        ):
            for name in (part.split(" as ")[0].strip() for part in names.split(",")):
                found += 1
                defined = re.search(rf"\b{name}\b", modules.get(module, "")) if name else True
                if not defined and f"{module}.{name}" not in modules:
                    wrong.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert found > 1000
    assert wrong == []
