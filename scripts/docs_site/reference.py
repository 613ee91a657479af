"""Pages of the documentation about configuration keys, components, plugins and support, each from the code."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nxdt_core.api import CAPABILITIES
from nxdt_core.config.schema import SLOTS, RunConfig, usable_class
from nxdt_core.config.section import REQUIRED, DefaultsTo, Key, keys_of
from nxdt_core.config.show import class_doc, field_docs
from nxdt_core.config.tree import join, plain
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel

ROOT = Path(__file__).resolve().parents[2]
SITE = "https://github.com/nxdt/nxdt/blob/main"


def section_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of a page for each section of the configuration, and of their index."""
    top = [name for name, key in keys_of(RunConfig).items() if key.section is not None]
    yield "reference/yaml.md", "\n".join(_index(top))
    for name in top:
        section = keys_of(RunConfig)[name].section
        assert section is not None
        yield f"reference/config/{name}.md", "\n".join(_section_page(name, section))


def component_pages(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of a page for each kind of components: the keys of the core's, and links to plugins'."""
    for slot in SLOTS:
        found = list(kernel.registry.all(slot.kind))
        lines = [f"# Components: `{slot.key}`", "", f"`{slot.key}` selects one of these by name.", ""]
        for component in found:
            record = component.record
            lines += [f"## {record.name} {{ #{record.name} }}", "", f"{record.summary}.", ""]
            if component.dist == "nxdt-core":
                lines += _component_keys(component, slot.key)
            elif page := _plugin_page(component.dist):
                lines += [f"From `{component.dist}`: [all keys](../plugins/{page}.md#keys).", ""]
        yield f"reference/components/{slot.key}.md", "\n".join(lines)


def plugin_pages(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of a page for each plugin here: its README and all keys of its components."""
    for folder, project in _projects().items():
        readme = _moved_links((ROOT / folder / "README.md").read_text(), folder)
        readme = re.sub(r"\A# .*", f"# {project['name']}", readme)
        lines = [readme.rstrip(), "", "## Keys { #keys }", ""]
        mine = [
            (slot, each) for slot in SLOTS for each in kernel.registry.all(slot.kind) if each.dist == project["name"]
        ]
        for slot, component in mine:
            lines += [f"### `{slot.key}: {component.record.name}`", "", f"{component.record.summary}.", ""]
            lines += _component_keys(component, f"{slot.key}-{component.record.name}", 4)
        if not mine:
            lines += ["Its components have no keys in the configuration of a run.", ""]
        yield f"reference/plugins/{_page_name(project)}.md", "\n".join(lines)


def support_page(kernel: Kernel) -> str:
    """Return the support matrix: what components declare, and which layouts are tested."""
    records = {kind: _own(kernel, kind) for kind in (*CAPABILITIES, "adapter", "objective")}
    models, engines = records["model"], records["engine"]
    lines = [
        "# Support matrix",
        "",
        "This page shows which models, layouts, adapters and engines work together. Components",
        "declare what they support. A configuration that needs more is an error before anything starts (`NXDT-C022`).",
        "",
        "TP, SP, PP, CP, EP: tensor, sequence, pipeline, context and expert parallelism. ✓: supported. –: refused.",
        "",
        "## Tested layouts",
        "",
        "The conformance kit of models trains each model in these layouts of the engine `torch` on real processes. It",
        "compares losses and weight updates with a single-process run. Other combinations of them are supported, too.",
        "",
        *_marks("Layout", models, {title: layout.needs for title, layout in _layouts()}),
        "## Models",
        "",
        *_marks("The model declares", models, _meanings("model")),
        "## Engines",
        "",
        "A run needs both: the model and the engine declare what the layout uses. What an engine lacks of something",
        "that it declares, such as a pipeline schedule, its rules refuse (`NXDT-C016`).",
        "",
        *_marks("The engine declares", engines, _meanings("engine")),
        "## Adapters and objectives",
        "",
        *_marks("`adapter.name`", models, {f"`{each.name}`": each.requires_of_model for each in records["adapter"]}),
        *_marks(
            "`adapter.name`, `objective.name`",
            engines,
            {f"`{each.name}`": each.requires | {"adapters"} for each in records["adapter"]}
            | {f"`{each.name}`": each.requires for each in records["objective"]},
        ),
        "## Optimizers",
        "",
        "TP, EP and ZeRO need an optimizer that updates shards of parameters.",
        "",
        "| `model.optim.name` | Updates shards |",
        "|---|:-:|",
        *(f"| `{each.name}` | {_mark('sharded' in each.capabilities)} |" for each in records["optimizer"]),
    ]
    return "\n".join(lines)


def _own(kernel: Kernel, kind: str) -> list[Any]:
    """Return the records of components of this repository."""
    return [each.record for each in kernel.registry.all(kind) if each.dist.startswith("nxdt-")]


def _layouts() -> Iterator[tuple[str, Any]]:
    """Yield the layouts of the conformance kit of models, with a title such as ``TP, ZERO-3``."""
    from nxdt_testing.runs.layouts import LAYOUTS

    words = {"documents": "packed documents", "lora": "LoRA", "zero3": "ZeRO-3", "gather": "gathered keys"}
    for name, layout in LAYOUTS.items():
        yield ", ".join(words.get(part, part.upper()) for part in name.split("-")), layout


def _meanings(kind: str) -> dict[str, frozenset[str]]:
    return {f"`{word}`: {meaning}": frozenset({word}) for word, meaning in CAPABILITIES[kind].items()}


def _marks(title: str, columns: list[Any], rows: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Yield a table: which of the columns' records declare all that a row needs."""
    yield from (
        '<div class="marks" markdown>',
        "",
        f"| {title} | {' | '.join(f'`{column.name}`' for column in columns)} |",
    )
    yield "|---" + "|:-:" * len(columns) + "|"
    for row, needs in rows.items():
        yield f"| {row} | {' | '.join(_mark(needs <= column.capabilities) for column in columns)} |"
    yield from ("", "</div>", "")


def _mark(supported: bool) -> str:
    return "✓" if supported else "–"


def _index(top: list[str]) -> Iterator[str]:
    yield from ("# All keys", "", "Every key of the configuration has an anchor on the page of its section.", "")
    yield from ("| Section | What it configures |", "|---|---|")
    keys = keys_of(RunConfig)
    docs = field_docs(RunConfig)
    for name in top:
        yield f"| [`{name}`](config/{name}.md) | {docs.get(name, '')} |"
    yield from (
        "",
        "Keys of components are on the pages of their kind or plugin:",
        "",
        "| Key | Components |",
        "|---|---|",
    )
    for slot in SLOTS:
        yield f"| [`{slot.key}`](components/{slot.key}.md) | {slot.kind.replace('_', ' ')} |"
    yield from ("", "## Top level", "")
    for name, key in keys.items():
        if name not in top:
            yield from _key(key, docs.get(name, ""), name, 3)


def _section_page(name: str, cls: type) -> Iterator[str]:
    yield from (f"# {name}", "", class_doc(cls), "")
    for path, section in _sections(cls, name):
        docs = field_docs(section)
        if path != name:
            yield from (f"## {path} {{ #{path} }}", "", class_doc(section), "")
        for key_name, key in keys_of(section).items():
            if key.section is None:
                yield from _key(key, docs.get(key_name, ""), join(path, key_name), 3)


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    yield path, cls
    for name, key in keys_of(cls).items():
        if key.section is not None:
            yield from _sections(key.section, join(path, name))


def _key(key: Key, doc: str, path: str, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} `{key.name}` {{ #{path} }}", "")
    yield from (f"Value: {_escaped(key.describe())}. Default: {_default(key)}.", "", _escaped(doc), "")


def _component_keys(component: Any, anchor: str, level: int = 3) -> list[str]:
    try:
        cls = usable_class(component)
    except NxdtError:  # `nxdt plugins show` says what is wrong with it
        return []
    if cls is None or not keys_of(cls):
        return ["It has no keys.", ""]
    docs = field_docs(cls)
    rows = keys_of(cls).items()
    name = component.record.name
    return [line for key, each in rows for line in _key(each, docs.get(key, ""), f"{anchor}-{name}-{key}", level)]


def _default(key: Key) -> str:
    follows = key.mark(DefaultsTo)
    if follows is not None:
        return f"the value of `{follows.key}`"
    return "none, the key is required" if key.default is REQUIRED else f"`{_literal(key.default)}`"


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(plain(value)) if value != "" else '""'


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _projects() -> Mapping[Path, Mapping[str, Any]]:
    files = sorted(ROOT.glob("plugins/*/*/pyproject.toml"))
    return {path.parent.relative_to(ROOT): tomllib.loads(path.read_text())["project"] for path in files}


def _plugin_page(dist: str) -> str | None:
    return next((_page_name(project) for project in _projects().values() if project["name"] == dist), None)


def _page_name(project: Mapping[str, Any]) -> str:
    """Return the name of a plugin's page; two folders may have one name, distributions do not."""
    return str(project["name"]).removeprefix("nxdt-plugin-").replace("-", "_")


def _moved_links(markdown: str, folder: Path) -> str:
    """Return a README whose relative links lead to pages of the site, or else to the repository."""

    def moved(found: re.Match[str]) -> str:
        target, _, anchor = found[1].partition("#")
        if "://" in target or not target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder.as_posix(), target))
        place = _page_of(path) or f"{SITE}/{path}"
        return f"]({place}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, markdown)


def _page_of(path: str) -> str | None:
    """The page of the site for a file of the repository, relative to the pages of plugins."""
    if path == "README.md":
        return "../../index.md"
    if path.startswith("docs/"):
        return f"../../{path.removeprefix('docs/')}"
    folder = Path(path).parent
    project = _projects().get(folder)
    return f"{_page_name(project)}.md" if project is not None and Path(path).name == "README.md" else None
