"""The public surface of nxdt as lines of text, and what differs from the file that keeps it.

    python scripts/public_api.py            say what differs from tests/api/public_api.txt; exit status 1 where it does
    python scripts/public_api.py --write    write the file; ``make api`` calls it

Python is read from the source and not imported, so that the lines are equal under every version of Python and torch.
``docs/public-api.md`` lists the modules and is what this script reads them from.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "api" / "public_api.txt"
PAGE = ROOT / "docs" / "public-api.md"

__all__ = [
    "GOLDEN",
    "Difference",
    "compare",
    "is_public",
    "modules",
    "public_names",
    "report",
    "rooms",
    "surface",
    "undeprecated",
    "verdict",
]

_NAMES_ONLY = ("nxdt_core.errors",)
"""Packages whose classes are listed without their members: errors are raised with keywords, which mypy checks."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A line that was added, removed or changed."""

    what: str
    """``added``, ``removed`` or ``changed``."""
    line: str
    """As it is now; of a removed one as it was."""
    breaking: bool
    """Whether something that worked may stop working."""


def rooms(heading: str = "") -> list[str]:
    """Return the public modules and packages that the page lists; ``package.*`` means all modules below.

    Args:
        heading: of the section, ``Stable modules`` or ``Provisional modules``; both by default.
    """
    text = PAGE.read_text()
    text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else text
    return re.findall(r"^\| `(nxdt_(?:core|testing)[\w.]*(?:\.\*)?)`", text, flags=re.MULTILINE)


def is_public(module: str, listed: Sequence[str]) -> bool:
    """Return whether a module is one of those listed."""
    return any(
        module == room or (room.endswith(".*") and f"{module}.".startswith(room.removesuffix("*"))) for room in listed
    )


def modules() -> dict[str, Path]:
    """Return the source file of every public module."""
    listed, found = rooms(), {}
    for package in (ROOT / "nxdt_core", ROOT / "testing" / "src" / "nxdt_testing"):
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if is_public(name, listed):
                found[name] = path
    return found


def surface() -> list[str]:
    """Return the lines of everything public, sorted."""
    stable, lines = rooms("Stable modules"), set()
    for name, path in modules().items():
        found = _module(name, ast.parse(path.read_text()))
        whole = is_public(name, stable) and not name.startswith(_NAMES_ONLY)
        lines |= {line for line in found if whole or _is_name_of(name, line)}
    return sorted({*lines, *_hooks(), *_errors(), *_keys(), *_commands(), *_json_keys(), *_deprecations()})


def undeprecated(found: Sequence[Difference], old: Sequence[str]) -> list[str]:
    """Return the lines that were removed although the surface before did not call them deprecated.

    Args:
        found: differences from ``old``.
        old: the surface before. Lines of provisional modules are not in question.
    """
    stable = rooms("Stable modules")
    going = [line.partition(" ")[2].partition(" : ")[0] for line in old if line.startswith("deprecated ")]

    def owed(line: str) -> bool:
        kind, _, rest = line.partition(" ")
        name = re.split(r"[ (]", rest)[0]
        if kind in ("deprecated", "parameter", "member") or any(f"{name}.".startswith(f"{each}.") for each in going):
            return False
        return kind in ("key", "command", "option", "hook", "json") or is_public(name.rpartition(".")[0], stable)

    return [each.line for each in found if each.what == "removed" and owed(each.line)]


def compare(old: Sequence[str], new: Sequence[str]) -> list[Difference]:
    """Return the differences between two surfaces, breaking ones first."""
    before, after = ({_identity(line): line for line in lines} for lines in (old, new))
    found = [Difference("removed", before[key], True) for key in before.keys() - after.keys()]
    found += [Difference("added", after[key], _binds(after[key])) for key in after.keys() - before.keys()]
    same = before.keys() & after.keys()
    found += [
        Difference("changed", f"{before[key]}  →  {after[key]}", True) for key in same if before[key] != after[key]
    ]
    new_parts = {key for key in after.keys() - before.keys() if not key.startswith(("parameter", "member"))}
    found = [  # a required parameter of a function that is new itself breaks nothing
        Difference(each.what, each.line, False) if each.what == "added" and _owners(each.line) & new_parts else each
        for each in found
    ]
    return sorted(found, key=lambda each: (not each.breaking, each.what, each.line))


def verdict(found: Sequence[Difference], version: str) -> str:
    """Return which part of the version rises for these differences."""
    stable = int(version.partition(".")[0]) >= 1
    if any(each.breaking for each in found):
        return "major" if stable else "minor"
    return "minor" if stable else "patch"


def _is_name_of(module: str, line: str) -> bool:
    """Whether a line names what a module exports, and not a member or parameter of it."""
    kind, _, rest = line.partition(" ")
    return kind != "parameter" and "." not in _identity(rest).removeprefix(f"{module}.")


def _identity(line: str) -> str:
    return line.partition(" : ")[0]


def _binds(line: str) -> bool:
    """Whether an added line asks something of others: a member of a protocol, or a parameter without a default."""
    if line.startswith("argument nxdt "):
        return line.endswith(" : required")
    return line.startswith("member ") or (line.startswith(("parameter ", "key ")) and " = " not in line)


def _owners(line: str) -> set[str]:
    """The identities that a parameter or member may belong to."""
    path = _identity(line).partition(" ")[2]
    if line.startswith("parameter "):
        return {f"{kind} {path.partition('(')[0]}" for kind in ("function", "class")}
    return {f"protocol {path.rpartition('.')[0]}", f"command {path.rpartition(' ')[0]}"}


def _module(name: str, tree: ast.Module) -> Iterator[str]:
    public = public_names(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in public:
            yield from _class(name, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in public:
            yield from _function(f"{name}.{node.name}", node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in public:
                    yield f"name {name}.{alias.asname or alias.name} : from {node.module}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id in public:
                    yield f"name {name}.{target.id}"


def public_names(tree: ast.Module) -> set[str]:
    """Return the names in ``__all__`` of a module; of one without it, what it defines."""
    defined = set()
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        if names == ["__all__"] and isinstance(node, ast.Assign):
            return set(ast.literal_eval(node.value))
        defined |= {*names, *([node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else [])}
    return {name for name in defined if not name.startswith("_")}


def _class(module: str, node: ast.ClassDef) -> Iterator[str]:
    bases = [ast.unparse(base) for base in node.bases]
    protocol = any(base.partition("[")[0] == "Protocol" for base in bases)
    path = f"{module}.{node.name}"
    yield f"{'protocol' if protocol else 'class'} {path} : {', '.join(bases)}".removesuffix(" : ")
    record = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith(("_", "test_")):
            if protocol:
                yield f"member {path}.{part.name} : ({ast.unparse(part.args)}) -> {_text(part.returns)}"
            else:
                yield from _function(f"{path}.{part.name}", part)
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            yield from _parameters(path, part)
        elif isinstance(part, ast.AnnAssign) and not _text(part.target).startswith("_"):
            kind = "member" if protocol else "parameter" if record else "name"
            own = f"{path}({_text(part.target)})" if kind == "parameter" else f"{path}.{_text(part.target)}"
            default = f" = {_text(part.value)}" if part.value is not None and kind == "parameter" else ""
            yield f"{kind} {own} : {_text(part.annotation)}{default}"


def _function(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    marks = [
        each for each in map(ast.unparse, node.decorator_list) if each in ("property", "classmethod", "staticmethod")
    ]
    yield f"function {path} : {' '.join([*marks, '->', _text(node.returns)])}"
    yield from _parameters(path, node)


def _parameters(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    for number, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        if arg.arg not in ("self", "cls"):
            yield _parameter(path, arg, default, f"[{number}] ")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(path, arg, default, "")
    for star, arg in (("*", args.vararg), ("**", args.kwarg)):
        if arg is not None:
            yield f"parameter {path}({star}) : {_text(arg.annotation)} = ()"


def _parameter(path: str, arg: ast.arg, default: ast.expr | None, place: str) -> str:
    given = f" = {_text(default)}" if default is not None else ""
    return f"parameter {path}({arg.arg}) : {place}{_text(arg.annotation)}{given}"


def _text(node: ast.AST | None) -> str:
    return "None" if node is None else " ".join(ast.unparse(node).split())


def _hooks() -> Iterator[str]:
    for node in ast.parse((ROOT / "nxdt_core" / "kernel" / "hookspecs.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("nxdt_"):
            yield f"hook {node.name} : -> {_text(node.returns)}"
            for arg in node.args.args:
                yield f"argument {node.name}({arg.arg}) : {_text(arg.annotation)}"


def _errors() -> Iterator[str]:
    for path in sorted((ROOT / "nxdt_core" / "errors").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, ast.Assign) and _text(part.targets[0]) == "code":
                    yield f"error {ast.literal_eval(part.value)} : {path.stem}.{node.name}"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                code = node.value.args[0]
                if _text(node.value.func).endswith(".define") and isinstance(code, ast.Constant):
                    yield f"error {code.value} : {path.stem}.{_text(node.targets[0])}"


def _keys() -> Iterator[str]:
    """Keys of the core, and of the components of this repository."""
    from nxdt_core.config.annotations import Deprecated
    from nxdt_core.config.components import usable_class
    from nxdt_core.config.schema import SLOTS, RunConfig
    from nxdt_core.config.section import REQUIRED, keys_of
    from nxdt_core.config.tree import Place
    from nxdt_core.kernel import Kernel

    def lines(cls: type, path: str) -> Iterator[str]:
        for name, key in keys_of(cls).items():
            if key.section is not None:
                yield from lines(key.section, f"{path}{name}.")
            else:
                default = "" if key.default is REQUIRED else f" = {key.default}"
                yield f"key {path}{name} : {key.describe()}{default}"
                going = key.mark(Deprecated)
                if going is not None:
                    yield f"deprecated {path}{name} : since {going.since}, goes in {going.goes}, use {going.use}"

    yield from lines(RunConfig, "")
    registry = Kernel.start().registry
    for slot in SLOTS:
        for component in registry.all(slot.kind):
            if component.dist.startswith("nxdt-"):
                cls = usable_class(component, Place(place=component.dist, line=0, key=""))
                yield f"component {slot.key}: {component.record.name}"
                yield from lines(cls, f"{slot.key} ({component.record.name}).") if cls is not None else ()


_DEPRECATING = ("deprecated", "deprecated_module", "deprecated_name")


def _deprecations() -> Iterator[str]:
    """What is deprecated: calls of nxdt_core.deprecation, and keys with the mark."""
    for path in sorted((ROOT / "nxdt_core").rglob("*.py")):
        if path.name == "deprecation.py":
            continue
        text = path.read_text()
        tree = ast.parse(text) if "deprecated" in text.lower() else ast.Module([], [])
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        owners = {id(each): node.name for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or _text(node.func).rpartition(".")[2] not in _DEPRECATING:
                continue
            given = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
            name = ast.literal_eval(node.args[0]) if node.args else f"{module}.{owners[id(node)]}"
            yield f"deprecated {name} : since {given['since']}, goes in {given['goes']}, use {given['use']}"


def _json_keys() -> Iterator[str]:
    """Keys of what ``--json`` prints, from the table of the documentation, which a test compares with the commands."""
    text = (ROOT / "docs" / "reference" / "terminal.md").read_text()
    for command, kind, keys in re.findall(r"^\| (`.*?) \| (object|list) \| (.*) \|$", text, flags=re.MULTILINE):
        words, _, part = command.replace("`", "").partition(", each of ")
        path = f"nxdt {words} --json {f'{part}[]' if part else '[]' if kind == 'list' else ''}".strip()
        yield from (f"json {path} {key}" for key in re.findall(r"`(\w+)`", keys))


def _commands() -> Iterator[str]:
    import click

    from nxdt_core.cli.app import root

    def lines(command: click.Command, words: str) -> Iterator[str]:
        yield f"command {words}"
        for parameter in command.params:
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            if isinstance(parameter, click.Argument):
                yield f"argument {words} {parameter.name} : {'required' if parameter.required else 'optional'}"
            elif names != "--help":
                yield f"option {words} {names}"
        if isinstance(command, click.Group):
            own = command.summaries() if hasattr(command, "summaries") else command.commands
            for name in own:
                below = command.own_command(name) if hasattr(command, "own_command") else command.commands[name]
                yield from lines(below, f"{words} {name}")

    yield from lines(root, "nxdt")


def main(*arguments: str) -> int:
    """Write the file, or print what differs from it."""
    lines = surface()
    if arguments == ("--write",):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("\n".join(lines) + "\n")
        return 0
    found = compare(GOLDEN.read_text().splitlines(), lines)
    print(report(found))
    return 1 if found else 0


def report(found: Sequence[Difference]) -> str:
    """Return the differences as text, with the part of the version that rises."""
    from nxdt_core import __version__

    if not found:
        return "the public surface is that of tests/api/public_api.txt"
    sudden = undeprecated(found, GOLDEN.read_text().splitlines())
    rows = [f"{'BREAKING ' if each.breaking else ''}{each.what}: {each.line}" for each in found]
    if sudden:
        rows.append(f"Removed without being deprecated first: {'; '.join(sudden)}.")
    part = f"The {verdict(found, __version__)} version rises (now {__version__})."
    return "\n".join([*rows, f"{part} If this is intended, run `make api` and name it in CHANGELOG.md."])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
