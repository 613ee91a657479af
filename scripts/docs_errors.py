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
    "P": "Parallel layouts and ranks",
    "S": "Checkpoints and storage",
    "T": "Training",
}
_EXAMPLES = 3


def errors_page() -> str:
    """Return the page: a section for each family, and in it one for each code."""
    uses = _uses()
    lines = [
        "# Error codes",
        "",
        "An error that you can fix has a code and two sentences: what was found, and what to do. The exit status is 2,",
        "or 1 where a process died. Values that a message fills in are written ‹like this›.",
        "",
    ]
    family = ""
    for code, kind in sorted((kind.code, kind) for kind in error_kinds()):
        if (letter := code.removeprefix("NXDT-")[0]) != family:
            family = letter
            lines += [f"## {FAMILIES.get(letter, letter)} {'{'} #{letter} {'}'}", ""]
        lines += _section(code, kind, uses.get(kind.__name__, []))
    return "\n".join(lines)


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
    yield from (f"### {code} {{ #{code} }}", "", _markup((inspect.getdoc(kind) or "").split("\n\n")[0]), "")
    yield from (f"Message: {shown(kind.happened)}", "")
    own = re.fullmatch(r"\{(\w+)\}", kind.remedy)
    if own is None:
        yield from (f"Fix: {shown(kind.remedy)}", "")
    filled = [use for use in uses if any(use.values())][:_EXAMPLES]
    if own is not None:
        yield from ("Fix: the second sentence of the message, which depends on what was found.", "")
    advice = own[1] if own else ""
    for use in filled:
        found = "; ".join(
            shown(text).rstrip(".") for name, text in use.items() if name != advice and name in ("reason", "problem")
        )
        fix = shown(use[advice]) if advice in use else ""
        if found or fix:
            yield f"- Example: {found or 'as above'}.{' Fix: ' + fix if fix else ''}"
    yield ""


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
        parts = [part.value if isinstance(part, ast.Constant) else "{value}" for part in node.values]
        return "".join(str(part) for part in parts)
    return ""


def _markup(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
