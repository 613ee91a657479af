"""Each call of a row of the catalogue of errors passes what the row's templates need, and nothing else."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from string import Formatter

import pytest

from nxdt_core.cli.explain import error_codes
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointIsNoFile
from nxdt_core.errors.data import DataFileNotFound

ROOT = Path(__file__).parents[2]
SOURCES = ("nxdt_core/**/*.py", "testing/src/**/*.py", "plugins/*/*/src/**/*.py")


def names_in(template):
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name}


@cache
def rows():
    """(module, name) → the names that a call must pass, and those that it may pass."""
    found = {}
    for path in [*ROOT.glob("nxdt_core/errors/*.py"), *ROOT.glob("plugins/*/*/src/**/errors.py")]:
        tree = ast.parse(path.read_text())
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[parts.index("src") + 1 :] if "src" in parts else parts)
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).partition("(")[0].endswith(".define"):
                row = getattr(import_module(module), node.targets[0].id)
                found[module, node.targets[0].id] = wanted(row, node.value)
    return found


def wanted(row, call):
    further = {each.arg: each.value for each in call.keywords}
    also = further.get("also")
    source = ast.parse(inspect.getsource(row.also)) if isinstance(also, ast.Name) else also
    inside = [] if source is None else list(ast.walk(source))
    computed = {key.value for each in inside if isinstance(each, ast.Dict) for key in each.keys if key is not None}
    read = {each.attr for each in inside if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "error"}
    needed = ((names_in(row.happened) | names_in(row.remedy)) - computed) | read
    family = set(row.family._fields()) if row.family is not NxdtError else set()
    return needed - row.defaults.keys(), needed | row.defaults.keys() | family


def calls():
    """Place, module and name of the row, and keywords, of each call of a row."""
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            text = path.read_text()
            if "errors" not in text:
                continue
            nodes = [*ast.walk(ast.parse(text))]
            origin = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in nodes
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            named = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
            for node in named:
                row = origin.get(node.func.id)
                if row in rows():
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", row, node


def test_each_call_passes_what_the_templates_need_and_nothing_else():
    found, wrong = list(calls()), []
    assert len(found) > 500
    for place, row, node in found:
        needed, allowed = rows()[row]
        given = {each.arg for each in node.keywords}
        if node.args or not (None in given or needed <= given) or not given - {None} <= allowed:
            wrong.append(f"{place}: {row[1]}({', '.join(sorted(map(str, given)))}) needs {sorted(needed)}")
    assert wrong == []


def test_code_catches_each_class_of_errors():
    """What no code tells apart by its class is a row."""
    files = [path for pattern in (*SOURCES, "benchmarks/**/*.py") for path in ROOT.glob(pattern)]
    text = "\n".join(path.read_text() for path in files)
    handlers = re.findall(r"(?:except|isinstance|suppress|raises|issubclass)\b[^\n]*", text) + re.findall(
        r"^\w+(?:: [^=]+)? = \([^)]*\)", text, flags=re.MULTILINE
    )
    named = set(re.findall(r"\w+", " ".join(handlers)))
    defined = {*re.findall(r"^class (\w+)\(", text, flags=re.MULTILINE)}
    classes = {name for name, _ in error_codes().values()} & defined
    assert 30 < len(classes) <= 45
    assert classes - named == {"StorageDenied", "StorageFull"}, "which stores of others catch"


def test_a_missing_value_fails_where_the_error_is_made():
    with pytest.raises(KeyError, match="path"):
        DataFileNotFound(key="data.train_files")


def test_an_error_of_a_row_is_one_of_its_family_and_survives_a_pickle():
    error = CheckpointIsNoFile(where="a/{b}", reason="it is a link")
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert isinstance(each, CheckpointDamaged)
        assert (each.code, each.where, each.exit_status) == ("NXDT-S019", "a/{b}", 2)
        assert str(each).startswith("[NXDT-S019] nxdt does not open a/{b}: it is a link.\n")
    assert str(error) == str(again)
