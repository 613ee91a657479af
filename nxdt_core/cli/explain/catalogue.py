"""What is known of every error code: its cause, its message, examples and a fix.

All of it is read from the error classes and from the code that raises them. The documentation and ``nxdt explain``
show the same.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel

__all__ = ["Explanation", "error_kinds", "explanations"]

_EXAMPLES = 3
_PLACEHOLDER = re.compile(r"'?\{(\w+)(?:![rsa])?(?::[^{}]*)?\}'?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One error code, in text without markup but for backticks; ``‹name›`` is a value that a message fills in."""

    code: str
    cause: str
    message: str
    fix: str
    depends: bool
    """Whether the second sentence of the message is written for what was found; ``fix`` is then the usual one."""
    examples: tuple[tuple[str, str], ...]
    """What was found and how it is fixed, as the code says it; the second is empty where ``fix`` says it."""


def explanations(codes: Collection[str] | None = None) -> dict[str, Explanation]:
    """Return the explanation of each of ``codes`` that exists, or of all codes, in their order."""
    kinds = sorted(error_kinds(), key=lambda kind: kind.code)
    packages = tuple(sorted({kind.__module__.partition(".")[0] for kind in kinds}))
    if codes is not None:
        kinds = [kind for kind in kinds if kind.code in codes]
    uses = _uses(packages, frozenset(kind.__name__ for kind in kinds))
    return {kind.code: _explained(kind, uses.get(kind.__name__, ())) for kind in kinds}


def error_kinds() -> list[type[NxdtError]]:
    """Return every error with a sentence, of the core and of the plugins that are installed."""
    from nxdt_core import errors

    families = [f"{errors.__name__}.{module.name}" for module in pkgutil.iter_modules(errors.__path__)]
    families += [f"{plugin.module}.errors" for plugin in Kernel.start().plugins if plugin.module]
    modules = [import_module(name) for name in families if find_spec(name) is not None]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return [kind for kind in found if issubclass(kind, NxdtError) and hasattr(kind, "happened")]


def _explained(kind: type[NxdtError], uses: Sequence[Mapping[str, str]]) -> Explanation:
    own = re.fullmatch(r"\{(\w+)\}", kind.remedy)
    examples = []
    for use in uses:
        found = "; ".join(_filled(use[name]).rstrip(".") for name in ("reason", "problem") if name in use)
        advice = _filled(use[own[1]]) if own and own[1] in use else ""
        if found:
            examples.append((found, advice))
    return Explanation(
        code=kind.code,
        cause=_plain(" ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())),
        message=_filled(kind.happened),
        fix=re.sub(r"^(‹[^›]+›)+(?=[A-Z])", "", _filled(kind.usual_remedy or kind.remedy)),
        depends=own is not None,
        examples=tuple(sorted(dict.fromkeys(examples), key=lambda example: not example[1])[:_EXAMPLES]),
    )


def _filled(template: str) -> str:
    """Return a template with each value that is filled in written ``‹name›``."""
    text = template.replace("{{", "\0").replace("}}", "\1")
    text = _PLACEHOLDER.sub(lambda found: f"‹{found[1].replace('_', ' ')}›", text)
    return text.replace("\0", "{").replace("\1", "}").strip()


@lru_cache(maxsize=1)
def _uses(packages: tuple[str, ...], names: frozenset[str]) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """Return, by the name of an error of ``names``, the texts that the code of ``packages`` passes to it."""
    if not names:
        return {}
    called = re.compile(rf"\b({'|'.join(sorted(names))})\(")
    found: dict[str, list[Mapping[str, str]]] = {}
    for path in sorted(_sources(packages)):
        text = path.read_text(encoding="utf-8")
        if ("reason=" not in text and "problem=" not in text) or not called.search(text):
            continue  # parsing takes 20 times as long as reading
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                texts = {word.arg: _text(word.value) for word in node.keywords if word.arg}
                texts = {name: text for name, text in texts.items() if " " in text}
                if texts:
                    found.setdefault(node.func.id, []).append(texts)
    return found


def _sources(packages: Sequence[str]) -> Iterator[Path]:
    for name in packages:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from Path(folder).rglob("*.py")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else f"{{{_name(part)}}}" for part in node.values]
        return "".join(str(part) for part in parts)
    return ""


def _name(part: ast.expr) -> str:
    """Return a word for a value that a message fills in: the last name of its expression."""
    names = re.findall(r"[a-z_]\w*", ast.unparse(part.value)) if isinstance(part, ast.FormattedValue) else []
    return names[-1].strip("_") if names else "value"


def _plain(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
