"""The page of error codes: an anchor for each code, with cause, example and fix, from the classes and their uses."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from nxdt_core.errors import NxdtError

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {
    "A": "Alignment and preference data",
    "C": "Configuration",
    "D": "Data and tokenizers",
    "E": "Evaluation",
    "K": "Kernel and plugins",
    "L": "LoRA",
    "M": "Models and Hugging Face files",
    "N": "Trainium through neuronx-distributed",
    "P": "Parallel layouts and ranks",
    "S": "Checkpoints and storage",
    "T": "Training",
}
_EXAMPLES = 3


def errors_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the list of all codes, and of a page for each family with a section per code."""
    uses = _uses()
    kinds = sorted(((kind.code, kind) for kind in error_kinds()), key=lambda pair: pair[0])
    yield "reference/errors.md", "\n".join(_index([(code, _cause(kind)) for code, kind in kinds]))
    for letter, title in FAMILIES.items():
        lines = [f"# Errors {letter}: {title.lower()}", ""]
        for code, kind in kinds:
            if _letter(code) == letter:
                lines += _section(code, kind, uses.get(kind.__name__, []))
        yield f"reference/errors/{letter}.md", "\n".join(lines)


def _index(codes: list[tuple[str, str]]) -> Iterator[str]:
    yield from ("# Error codes", "")
    yield "An error that you can fix has a code and two sentences: what was found, what to do. The exit status is 2,"
    yield "or 1 where a process died. Each code has a section with its cause, its message, and a fix."
    for letter, title in FAMILIES.items():
        yield from ("", f"## {title}", "", "| Code | Cause |", "|---|---|")
        for code, cause in codes:
            if _letter(code) == letter:
                yield f"| [{code}](errors/{letter}.md#{code}) | {cause} |"


def _letter(code: str) -> str:
    return code.removeprefix("NXDT-")[0]


def error_kinds() -> list[type[NxdtError]]:
    """Return every error with a sentence, of the core and of the plugins that are installed."""
    from nxdt_core import errors
    from nxdt_core.kernel import Kernel

    families = [f"{errors.__name__}.{module.name}" for module in pkgutil.iter_modules(errors.__path__)]
    families += [f"{plugin.module}.errors" for plugin in Kernel.start().plugins if plugin.module]
    modules = [import_module(name) for name in families if find_spec(name) is not None]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return [kind for kind in found if issubclass(kind, NxdtError) and hasattr(kind, "happened")]


def _section(code: str, kind: type[NxdtError], uses: list[Mapping[str, str]]) -> Iterator[str]:
    yield from (f"## {code} {{ #{code} }}", "", _cause(kind), "")
    yield from (f"Message: {shown(kind.happened)}", "")
    own = re.fullmatch(r"\{(\w+)\}", kind.remedy)
    if own is None:
        yield from (f"Fix: {shown(kind.remedy)}", "")
    filled = [use for use in uses if any(use.values())][:_EXAMPLES]
    if own is not None:
        yield from ("Fix: the second sentence of the message, which depends on what was found.", "")
    advice = own[1] if own else ""
    for use in filled:
        if found := "; ".join(shown(use[name]).rstrip(".") for name in ("reason", "problem") if name in use):
            yield f"- Example: {found}.{' Fix: ' + shown(use[advice]) if advice in use else ''}"
    yield ""


def _cause(kind: type[NxdtError]) -> str:
    return _markup(" ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())).replace("|", "\\|")


def shown(template: str) -> str:
    """Return a template with each value that is filled in written ``‹name›``."""
    text = template.replace("{{", "\0").replace("}}", "\1")
    text = re.sub(r"'?\{(\w+)(?:![rsa])?(?::[^{}]*)?\}'?", lambda found: f"‹{found[1].replace('_', ' ')}›", text)
    return text.replace("\0", "{").replace("\1", "}").replace("|", "\\|").replace("<", "&lt;").strip()


def _uses() -> Mapping[str, list[Mapping[str, str]]]:
    """Return, by the name of an error, the texts that the code passes to it."""
    found: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    files = [*ROOT.glob("nxdt_core/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                texts = {word.arg: _text(word.value) for word in node.keywords if word.arg}
                texts = {name: text for name, text in texts.items() if " " in text}
                if texts:
                    found[node.func.id].append(texts)
    return found


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


def _markup(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
