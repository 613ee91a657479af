"""Pages of the documentation about the public Python names, from their source; nothing is imported."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import public_api

_LONGEST_LINE = 88
_LONGEST_PAGE = 25_000
"""Characters of Markdown on the page of a package; in a larger one each module has its own page."""
_SECTIONS = {"Args": "Parameters", "Returns": "Returns", "Yields": "Yields", "Raises": "Raises"}
_ROLE = re.compile(r":\w+:`(~?)([^`]+)`")


@dataclass(frozen=True, slots=True)
class Module:
    """A public module with its source and the page that describes it."""

    name: str
    page: str
    tree: ast.Module
    """Parsed source."""

    def exported(self) -> Iterator[tuple[str, ast.stmt, str]]:
        """Yield the public names in the order of the source, with the statement that binds each and the text below."""
        public = dict.fromkeys(public_api.public_names()[self.name])
        for node, after in zip(self.tree.body, [*self.tree.body[1:], None], strict=True):
            for name in _bound(node):
                if name in public and not isinstance(node, ast.ImportFrom):
                    del public[name]
                    yield name, node, _text(after)
        yield from ((name, public_api.definition(self.name, name), "") for name in public)  # what it imports


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the index and of a page for each package with public names, or for each module."""
    modules = _modules()
    long = {page for page, text in _pages(modules) if len(text) > _LONGEST_PAGE}
    modules = [
        replace(module, page=f"reference/api/{module.name}.md") if module.page in long else module for module in modules
    ]
    modules.sort(key=lambda each: (each.page, each.name))
    yield "reference/api.md", "\n".join(_index(modules))
    yield from _pages(modules)


def _pages(modules: list[Module]) -> Iterator[tuple[str, str]]:
    places = {f"{module.name}.{name}": module.page for module in modules for name, _, _ in module.exported()}
    places |= {module.name: module.page for module in modules}
    for page, inside in groupby(modules, lambda each: each.page):
        yield page, "\n".join(_page(page, list(inside), places))


def _modules() -> list[Module]:
    found = []
    for name in public_api.public_names():
        path = public_api.source_of(name)
        page = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found.append(Module(name, f"reference/api/{page}.md", ast.parse(path.read_text())))
    return sorted(found, key=lambda each: (each.page, each.name))


def _index(modules: list[Module]) -> Iterator[str]:
    yield from ("# Python API", "")
    yield "This is the reference of the public names: what a plugin may import and a script may rely on. The pages"
    yield "are generated from the source. [Public API](../public-api.md) says how they may change."
    yield from ("", "| Module | Contents |", "|---|---|")
    for module in modules:
        text = _first_sentence(ast.get_docstring(module.tree) or "")
        page = module.page.rpartition("/")[2]
        anchor = "" if page == f"{module.name}.md" else f"#{module.name}"
        yield f"| [`{module.name}`](api/{page}{anchor}) | {_escaped(_inline(text, None))} |"
    yield ""


def _page(page: str, modules: list[Module], places: Mapping[str, str]) -> Iterator[str]:
    name = page.rpartition("/")[2].removesuffix(".md")
    yield from (f"# {name}", "")
    yield from ("Generated from the source. The [Python API](../api.md) lists all public modules.", "")
    for module in modules:
        links = Links(page, module, places)
        if module.name != name:
            yield from (f"## {module.name.rpartition('.')[2]} {{ #{module.name} }}", "", f"`{module.name}`", "")
        yield from (*_docstring(module.tree, links), "")
        tabled = module.name.startswith("nxdt_core.errors.") and not module.name.endswith(".base")
        if tabled:
            yield from _errors(module, links)
        for exported, node, below in module.exported():
            if tabled and _error(node):
                continue
            described = _described(exported, node, below, links)
            place = f"{module.name}.{exported}"
            heading = f"### `{exported}` {{ #{place} }}"
            if exported.startswith("__"):  # Markdown would take it for emphasis in the attribute
                heading = f'### `{exported}` <span id="{place}"></span>'
            yield from (heading, "", *described, "")


class Links:
    """Links from one module's docstrings to the descriptions of other names."""

    def __init__(self, page: str, module: Module, places: Mapping[str, str]) -> None:
        self.page = page
        self.module = module.name
        self.places = places

    def to(self, target: str) -> str | None:
        """Return the link to a name as docstrings write it, or None where it has no description."""
        for full in (target, f"{self.module}.{target}"):
            if full in self.places:
                page = self.places[full].rpartition("/")[2]
                return page if page == f"{full}.md" else f"{page}#{full}"  # a module's own page has no such anchor
        return None


def _described(name: str, node: ast.stmt, below: str, links: Links) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (*_code(_signature(node)), *_docstring(node, links))
    elif isinstance(node, ast.ClassDef):
        yield from _class(node, links)
    elif isinstance(node, ast.ImportFrom):
        link = links.to(f"{node.module}.{name}")
        yield f"The name of [`{node.module}.{name}`]({link})." if link else f"From `{node.module}`."
    else:
        text = ast.unparse(node)
        yield from _code(text if len(text) <= _LONGEST_LINE else text.partition(" = ")[0])
        yield from _rendered(below, links)


def _class(node: ast.ClassDef, links: Links) -> Iterator[str]:
    start = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    yield from _code(_class_signature(node, start))
    yield from (*_docstring(node, links), "")
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
            doc = _text(after)
            yield f"- `{_flat(part)}`{': ' + _inline(_flowed(doc), links) if doc else ''}"
    yield ""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    for part in methods:
        if part.name.startswith(("_", "test_")) and part.name != "__call__":
            continue
        yield from (*_code(_signature(part)), *_docstring(part, links), "")
    tests = [part for part in methods if part.name.startswith("test_")]
    if tests:
        yield from ("Requirements:", "", *(f"- {_requirement(part, links)}" for part in tests), "")


def _requirement(node: ast.FunctionDef | ast.AsyncFunctionDef, links: Links) -> str:
    words = node.name.removeprefix("test_").replace("_", " ")
    doc = ast.get_docstring(node)
    return f"{words}{'. ' + _inline(_flowed(doc), links) if doc else ''}"


def _errors(module: Module, links: Links) -> Iterator[str]:
    yield from ("| Name | Code | Meaning |", "|---|---|---|")
    for name, node, _ in module.exported():
        code, meaning = _error(node) or ("", "")
        if not meaning:
            continue
        letter = code.removeprefix("NXDT-")[:1]
        text = f"[{code}](../errors/{letter}.md#{code})" if letter else "–"
        doc = _escaped(_inline(_first_sentence(meaning), links))
        yield f'| <span id="{module.name}.{name}"></span>`{name}` | {text} | {doc} |'
    yield ""


def _error(node: ast.stmt) -> tuple[str, str] | None:
    """Code and meaning of what a statement defines, if it is an error: a class, or a row of the catalogue."""
    if isinstance(node, ast.ClassDef):
        values = {_flat(part.targets[0]): part.value for part in node.body if isinstance(part, ast.Assign)}
        code = values.get("code")
        return str(code.value) if isinstance(code, ast.Constant) else "", ast.get_docstring(node) or ""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        code, cause, *_ = [*node.value.args, None, None]
        if _flat(node.value.func).endswith(".define") and isinstance(code, ast.Constant):
            return str(code.value), str(ast.literal_eval(cause)) if cause is not None else ""
    return None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = "".join(
        f"@{mark}\n"
        for mark in map(ast.unparse, node.decorator_list)
        if mark in ("property", "classmethod", "staticmethod", "contextmanager", "pytest.fixture")
    )
    if marks == "@property\n":
        return f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}  # property"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{marks}def {node.name}{_arguments(node.args, 4 + len(node.name) + len(result))}{result}"


def _class_signature(node: ast.ClassDef, start: ast.FunctionDef | None) -> str:
    bases = ", ".join(map(ast.unparse, node.bases))
    text = f"class {node.name}{'(' + bases + ')' if bases else ''}"
    if start is None:
        return text
    return f"{text}\n{node.name}{_arguments(start.args, len(node.name))}"


def _arguments(args: ast.arguments, taken: int) -> str:
    """Parameters in parentheses without ``self``, one per line where they do not fit on one."""
    own = ast.parse(f"def f({ast.unparse(args)}): ...").body[0]
    assert isinstance(own, ast.FunctionDef)
    positional = own.args.posonlyargs or own.args.args
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    parts = list(_split(ast.unparse(own.args)))
    text = ", ".join(parts)
    if len(text) + taken <= _LONGEST_LINE:
        return f"({text})"
    return "(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _split(text: str) -> Iterator[str]:
    """Yield the parameters of a list, with spaces around ``=`` where a type precedes it."""
    depth, part = 0, ""
    for letter in f"{text},":
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += " = " if letter == "=" and depth == 0 and ":" in part else letter


def _docstring(node: ast.AST, links: Links) -> list[str]:
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return list(_rendered(ast.get_docstring(node) or "", links))


def _rendered(text: str, links: Links) -> Iterator[str]:
    """Docstring as Markdown: sections as lists, literal blocks as code."""
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        section = _SECTIONS.get(line.removesuffix(":")) if line.endswith(":") else None
        if section:
            yield from ("", f"{section}:", "", *_items(_taken(lines), links), "")
        elif line.endswith("::") and not line.startswith(" "):
            rest = line.removesuffix("::").strip()
            yield from ([_inline(rest, links) + ":", ""] if rest else [""])
            yield from _code("\n".join(_taken(lines)))
        else:
            yield _inline(line, links)


def _taken(lines: list[str]) -> list[str]:
    """Remove the indented block from the beginning of the lines, and return it without its indentation."""
    block: list[str] = []
    while lines and (not lines[0].strip() or lines[0].startswith(" ")):
        block.append(lines.pop(0))
    return textwrap.dedent("\n".join(block)).strip("\n").splitlines()


def _items(block: list[str], links: Links) -> Iterator[str]:
    items: list[str] = []
    for line in block:
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif line.strip():
            items.append(line.strip())
    for item in items:
        name, found, rest = item.partition(": ")
        named = found and " " not in name.replace(", ", "")
        yield f"- `{name}`: {_inline(rest, links)}" if named else f"- {_inline(item, links)}"


def _inline(text: str, links: Links | None) -> str:
    def shown(match: re.Match[str]) -> str:
        short = match[2].rpartition(".")[2] if match[1] or match[2].startswith("nxdt_core.") else match[2]
        link = links.to(match[2]) if links else None
        return f"[`{short}`]({link})" if link else f"`{short}`"

    return _ROLE.sub(shown, text).replace("``", "`")


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _flat(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _flowed(text: str) -> str:
    return " ".join(text.split())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:;]) |\n\n|::", _flowed(text.partition("\n\n")[0]) + " ", maxsplit=1)[0].rstrip(".:;")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _text(node: ast.stmt | None) -> str:
    """The text of a statement that is a literal: the documentation of what is above it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
