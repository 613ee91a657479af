"""``nxdt explain``: the cause, the message, examples and a fix of every error code.

All of it is read from the catalogue of errors and from the code that raises them. The documentation shows the same.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from nxdt_core import errors
from nxdt_core.cli.terminal import print_facts
from nxdt_core.cli.verb import as_json, attributes, print_json, say, verb
from nxdt_core.errors.base import ErrorCode, NxdtError
from nxdt_core.errors.configuration import ConfigProblem
from nxdt_core.errors.plugins import UnknownErrorCode
from nxdt_core.kernel import Kernel

_PREFIX = "NXDT-"
_EXAMPLES = 3
_PLACEHOLDER = re.compile(r"'?\{(\w+)(?:![rsa])?(?::[^{}]*)?\}'?")


@verb("nxdt explain NXDT-C016", "nxdt explain C010 C016 --json")
@click.argument("codes", metavar="CODE...", nargs=-1, required=True)
@as_json
def explain(codes: tuple[str, ...], json_output: bool) -> None:
    """Explain error codes: cause, message, examples and fix, as on the documentation's page of error codes.

    The prefix NXDT- may be left out. A value that a message fills in is written ‹name›.
    """
    written = [code.strip("[]").upper() for code in codes]
    explained = explanations([*written, *(_PREFIX + code for code in written)])
    wanted = [code if code in explained else _PREFIX + code.removeprefix(_PREFIX) for code in written]
    for code in wanted:
        if code not in explained:
            raise UnknownErrorCode(wanted=code, known=tuple(sorted(error_codes())))
    objects = []
    for number, one in enumerate(map(explained.__getitem__, wanted)):
        facts = attributes(one, "code", "cause", "message", "fix")
        objects.append({**facts, "examples": [{"found": text, "fix": fix or None} for text, fix in one.examples]})
        if not json_output:
            say("", end="\n" if number else "")
            examples = [("example", f"{text}.{' ' + fix if fix else ''}") for text, fix in one.examples]
            print_facts([*facts.items(), *examples])
    if json_output:
        print_json(objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One error code, in text without markup but for backticks; ``‹name›`` is a value that a message fills in."""

    code: str
    cause: str
    message: str
    fix: str
    depends: bool
    """True if the error computes its second sentence from what was found; ``fix`` is then the usual one."""
    examples: tuple[tuple[str, str], ...]
    """Pairs of a problem and its fix, as the code words them; the second is empty where ``fix`` says it."""


def explanations(codes: Collection[str] | None = None) -> dict[str, Explanation]:
    """Return the explanation of each of ``codes`` that exists, or of all codes, in their order."""
    modules = _modules()
    wanted = {code: row for code, row in sorted(_rows(modules).items()) if codes is None or code in codes}
    packages = tuple(sorted({module.partition(".")[0] for module in modules}))
    uses = _uses(packages, frozenset(name for name, _ in wanted.values()))
    return {code: _explained(row, uses.get(name, ())) for code, (name, row) in wanted.items()}


def error_codes() -> dict[str, tuple[str, ErrorCode[NxdtError]]]:
    """Return the name in the source and the row of every error code of the core and of the installed plugins."""
    return _rows(_modules())


def _rows(modules: Sequence[str]) -> dict[str, tuple[str, ErrorCode[NxdtError]]]:
    rows = {}
    for module in map(import_module, modules):
        for name, value in vars(module).items():
            if isinstance(value, ErrorCode):
                rows[value.code] = name, value
            elif isinstance(value, type) and issubclass(value, NxdtError) and hasattr(value, "happened"):
                cause = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
                texts = attributes(value, "happened", "remedy", "usual_remedy", "exit_status", "example")
                rows[value.code] = name, value.define(value.code, cause, **texts)
    return rows


def _modules() -> list[str]:
    families = [f"{errors.__name__}.{module.name}" for module in pkgutil.iter_modules(errors.__path__)]
    plugins = [plugin.module for plugin in Kernel.start().plugins if plugin.module]
    packages = [name for name in plugins if hasattr(import_module(name), "__path__")]
    return [*families, *(f"{name}.errors" for name in packages if find_spec(f"{name}.errors") is not None)]


def _explained(row: ErrorCode[NxdtError], uses: Sequence[Mapping[str, str]]) -> Explanation:
    match = re.fullmatch(r"\{(\w+)\}", row.remedy)
    fix = re.sub(r"^(‹[^›]+›)+(?=[A-Z])", "", _filled(row.usual_remedy or row.remedy))
    met = []
    if row.example:
        error = row(**row.example)
        where = [error.place, error.key] if isinstance(error, ConfigProblem) else []
        advice = error.do().strip()
        met.append((": ".join(filter(None, (*where, error.what().rstrip(".")))), advice if advice != fix else ""))
    examples = []
    for use in uses:
        text = "; ".join(_filled(use[name]).rstrip(".") for name in ("reason", "problem") if name in use)
        advice = _filled(use[match[1]]) if match and match[1] in use else ""
        if text:
            examples.append((text, advice))
    cause = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", row.cause)
    return Explanation(
        code=row.code,
        cause=cause.replace("``", "`"),
        message=_filled(row.happened),
        fix=fix,
        depends=match is not None,
        examples=tuple(dict.fromkeys([*met, *sorted(examples, key=lambda example: not example[1])]))[:_EXAMPLES],
    )


def _filled(template: str) -> str:
    """Return a template with each value that is filled in written ``‹name›``."""
    text = template.replace("{{", "\0").replace("}}", "\1")
    text = _PLACEHOLDER.sub(lambda match: f"‹{match[1].replace('_', ' ')}›", text)
    return text.replace("\0", "{").replace("\1", "}").strip()


@lru_cache(maxsize=1)
def _uses(packages: tuple[str, ...], names: frozenset[str]) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """Return, by the name of an error of ``names``, the texts that the code of ``packages`` passes to it."""
    if not names:
        return {}
    called = re.compile(rf"\b({'|'.join(sorted(names))})\(")
    uses: dict[str, list[Mapping[str, str]]] = {}
    specs = filter(None, map(find_spec, packages))
    folders = [Path(folder) for spec in specs for folder in spec.submodule_search_locations or ()]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ("reason=" not in text and "problem=" not in text) or not called.search(text):
            continue  # parsing takes 20 times as long as reading
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                texts = {word.arg: _text(word.value) for word in node.keywords if word.arg}
                texts = {name: text for name, text in texts.items() if " " in text}
                if texts:
                    uses.setdefault(node.func.id, []).append(texts)
    return uses


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    parts = []
    for part in node.values if isinstance(node, ast.JoinedStr) else ():
        # A value that a message fills in is named by the last name of its expression.
        names = re.findall(r"[a-z_]\w*", ast.unparse(part.value)) if isinstance(part, ast.FormattedValue) else []
        name = names[-1].strip("_") if names else "value"
        parts.append(str(part.value) if isinstance(part, ast.Constant) else f"{{{name}}}")
    return "".join(parts)
