"""Writes the repository of a new plugin from the templates of its kind.

A template is a file below ``templates/<kind>`` or ``templates/common`` with the suffix ``.tmpl``. Its path there is
that in the repository, where ``PACKAGE`` in paths becomes the name of the package and ``dot.`` before a name a dot
(builders of wheels leave hidden files out). In paths and texts ``{{name}}``, ``{{package}}``, ``{{Class}}``,
``{{CODE}}``, ``{{kind}}``, ``{{core}}``, ``{{dependencies}}``, ``{{hook}}``, ``{{Record}}`` and ``{{summary}}`` are
replaced. Three more templates of a kind are parts of files: ``record.tmpl``, the fields of the component's record, is
``{{record}}`` in the entry module; ``use.md.tmpl`` is ``{{use}}`` in the README; ``sizes.tmpl`` is ``{{sizes}}`` in a
model's recipe.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from nxdt_core._version import __version__
from nxdt_core.api import KINDS
from nxdt_core.errors.plugins import BadPluginName, KindHasNoTemplates, RepositoryPlaceTaken, UnknownKind
from nxdt_core.system.regular_files import replace_text

__all__ = ["kind_names", "write_repository"]

_TEMPLATES = Path(__file__).with_name("templates")
_HIDDEN = re.compile(r"(^|(?<=/))dot\.")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TORCH = '"torch>=2.9"'
_DEPENDENCIES = {
    "model": ('"nxdt-plugin-text{core}"', '"safetensors>=0.5"', _TORCH),
    "dataset": ('"numpy>=2"',),
    "optimizer": (_TORCH,),
    "format": ('"safetensors>=0.5"', _TORCH),
    "adapter": (_TORCH,),
    "objective": (_TORCH,),
    "engine": (_TORCH,),
    "device": (_TORCH,),
}
"""Requirements of a distribution in addition to the core, by kind."""


def kind_names() -> tuple[str, ...]:
    """Return the kinds that :func:`write_repository` takes: those that have templates."""
    return tuple(kind.name for kind in KINDS if _has_templates(kind.name))


def _has_templates(kind: str) -> bool:
    return (_TEMPLATES / kind).is_dir()


def write_repository(kind: str, name: str, directory: Path, *, plain: bool = False) -> list[Path]:
    """Write the repository of a plugin that brings one component of ``kind``, called ``name`` like its distribution.

    Args:
        kind: a kind of components.
        name: of the distribution, the plugin and the component.
        directory: root of the new repository; is created.
        plain: of a model, take one in plain torch instead of a member of Llama's family.

    Returns:
        The files, relative to ``directory``.

    Raises:
        UnknownKind: there is no such kind.
        KindHasNoTemplates: there are no templates for it.
        BadPluginName: a distribution cannot have that name.
        RepositoryPlaceTaken: there is something in ``directory``.
    """
    row = next((item for item in KINDS if item.name == kind), None)
    if row is None:
        kinds = kind_names()
        raise UnknownKind(kind=kind, close=tuple(get_close_matches(kind, kinds)), available=kinds)
    if not _has_templates(f"plain_{kind}" if plain else kind):
        raise KindHasNoTemplates(kind=kind, available=kind_names())
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or package.startswith("nxdt"):
        raise BadPluginName(name=name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RepositoryPlaceTaken(path=str(directory))
    texts = {**_texts("common"), **_texts(kind), **(_texts(f"plain_{kind}") if plain else {})}
    major, minor = map(int, __version__.split(".")[:2])
    core = f">={major}.{minor},<{major}.{minor + 1}"
    required = [f'"nxdt-core{core}"', *(item.format(core=core) for item in _DEPENDENCIES.get(kind, ()))]
    values = {
        "name": name,
        "package": package,
        "Class": "".join(part.capitalize() for part in package.split("_")),
        "CODE": name.upper(),
        "kind": kind,
        "core": core,
        "dependencies": ", ".join(required),
        "summary": row.summary,
        "hook": row.hook,
        "Record": row.record.__name__,
    }
    for part in ("use.md", "record", "sizes"):
        values[Path(part).stem] = _filled(texts.pop(Path(part), ""), values).strip("\n")
    written = []
    for place, text in sorted(texts.items()):
        target = directory / _filled(_HIDDEN.sub(".", str(place)).replace("PACKAGE", package), values)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, _filled(text, values))
        written.append(target.relative_to(directory))
    return written


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], text)


def _texts(folder: str) -> dict[Path, str]:
    """Return the templates of a folder by their place in a repository."""
    root = _TEMPLATES / folder
    paths = root.rglob("*.tmpl")
    return {path.relative_to(root).with_suffix(""): path.read_text(encoding="utf-8") for path in paths}
