"""Plain data, and a table of where each of its values was written; YAML is read into both.

From YAML nothing but plain data is constructed. What differs from PyYAML's constructors: a key that occurs twice is a
problem, ``1e-4`` is a number, dates and ``1:30`` stay text, and a tag such as ``!!python/object`` is a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml

from nxdt_core.errors.configuration import ConfigProblem, DuplicateKey, Place, WrongValue, YamlSyntax, YamlTooLarge

MASK = "********"
"""Shown in place of a value that has no reference to show."""

LARGEST_INTEGER = 2**63 - 1
"""Integers go to torch, to C and to JSON, where they have 64 bits."""

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root."""


_FOUND: dict[type, str] = {bool: "boolean", int: "an integer", float: "a number", str: "text"}
_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+")
"""Floats of YAML 1.2 that PyYAML's YAML 1.1 takes for text: ``1e-4``, ``5e5``."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = set(map(_TAG.__add__, ("null", "bool", "int", "float")))
_TEXTS = set(map(_TAG.__add__, ("str", "timestamp", "value")))
_COLLECTIONS = set(map(_TAG.__add__, ("map", "seq")))
_MERGE = f"{_TAG}merge"
_DECIMAL = re.compile(r"[-+]?0[0-9_]+")
"""``010``: eight in YAML 1.1, ten in YAML 1.2 and for everybody who writes it."""
_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)")
_MOST_LEVELS = 100
"""Collections inside one another; a run's file has about six."""
_TOO_DEEP = f"it is nested deeper than {_MOST_LEVELS} levels"
_MOST_NODES = 100_000
"""Values of a document with its aliases written out; a run's file has some hundreds. Ten aliases of ten aliases, eight
times over, are a hundred million."""
_SHOWN = 60
"""Characters of a value that a message shows."""
# libyaml composes a run's file in 1 ms, the pure Python parser in 20 ms; a wheel without libyaml still works.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source of a value."""

    kind: Literal["file", "override", "default", "plugin", "hf"]
    where: str
    """``run.yaml:12``, ``command line``, the plugin's name, the key that it follows, or a ``config.json``."""
    line: int = 0
    """Line in the file, counted from 1; 0 where there is none."""
    written: str = ""
    """Place of the key that the value follows; empty where it follows none."""
    own: str = ""
    """Name of the key in a Hugging Face ``config.json``."""
    text: str = ""
    """Characters of a number, which may be those of a name, such as ``2026_11_28``, or of a null; empty where a
    file has a key without a value."""
    directory: Path | None = None
    """Directory of the file, where its relative paths start; None for a mapping in memory."""

    def __str__(self) -> str:
        return self.where if self.kind in ("file", "override", "hf") else f"{self.kind} {self.where}".rstrip()

    def at(self, key: str) -> Place:
        """Return the place of a problem with ``key``."""
        own = f" ({self.own})" if self.own else ""
        return Place(place=self.written or f"{self}{own}", line=self.line, key=key)


DEFAULT = Origin(kind="default", where="")


@dataclass(slots=True)
class Tree:
    """Plain data with the origin of each value."""

    data: Any
    """Dictionaries, lists and scalars; a dictionary at the top, unless a file has something else there."""
    origins: dict[KeyPath, Origin]
    """Origin of each mapping, list and scalar. Entries of values that were replaced may remain."""
    shown: dict[KeyPath, str] = field(default_factory=dict)
    """Text that is shown and written in place of a value: a reference to the environment, or :data:`MASK`."""

    @classmethod
    def of(cls, value: Any, origin: Origin) -> Tree:
        """Return the tree of plain data, or of a section, whose values all have one origin."""
        data = plain(value)
        return cls(data, {path: origin for path, _ in walk(data)})

    def copy(self, path: str | KeyPath = ()) -> Tree:
        """Return a tree of the values below a path, which can be changed without changing this one."""
        parts = parts_of(path)
        below = [(old[len(parts) :], old) for old, _ in walk(self.get(parts), parts)]
        origins = {at: self.origins[old] for at, old in below}
        return Tree(plain(self.get(parts)), origins, {at: self.shown[old] for at, old in below if old in self.shown})

    def get(self, path: str | KeyPath, default: Any = None) -> Any:
        """Return the value at a dotted path or key path, or ``default`` where there is none."""
        parts = parts_of(path)
        depth, value = self._reach(parts)
        return value if depth == len(parts) else default

    def __contains__(self, path: str | KeyPath) -> bool:
        return self.get(path, self) is not self

    def origin(self, path: str | KeyPath) -> Origin:
        """Return the origin of the value at a path; where there is none, that of what is around it."""
        parts = parts_of(path)
        return self.origins[parts[: self._reach(parts)[0]]]

    def _reach(self, parts: KeyPath) -> tuple[int, Any]:
        """Return how many parts of a path lead to a value, and that value."""
        value = self.data
        for depth, part in enumerate(parts):
            if not (
                part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            ):
                return depth, value
            value = value[part]
        return len(parts), value

    def set(self, path: str | KeyPath, value: Any, origin: Origin, shown: str | None = None) -> None:
        """Put a value of one origin at a path; mappings on the way are made."""
        parts, into = parts_of(path), self.data
        for depth, part in enumerate(parts[:-1], 1):
            if not isinstance(self.get(parts[:depth]), (dict, list)):
                into[part] = {}
                self.origins[parts[:depth]] = origin
            into = into[part]
        into[parts[-1]] = value = plain(value)
        self.origins |= {below: origin for below, _ in walk(value, parts)}
        self.shown.pop(parts, None)
        if shown is not None:
            self.shown[parts] = shown

    def remove(self, path: str | KeyPath) -> None:
        """Remove the value at a path of keys, if it is there."""
        *section, name = parts_of(path)
        around = self.get(tuple(section))
        if isinstance(around, dict):
            around.pop(name, None)

    def merge(self, above: Tree, path: KeyPath = ()) -> None:
        """Put the values of another tree over those below ``path``. Lists are replaced, not joined.

        A mapping of a file keeps its line when another source adds to it: there a key of it is missing. A section whose
        lines are all commented out, a key without a value, changes nothing.
        """
        mine, theirs, origin = self.get(path), above.get(path), above.origins[path]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if self.origins[path].kind != "file":
                self.origins[path] = origin
            for key in theirs:
                self.merge(above, (*path, key))
        elif not (isinstance(mine, dict) and theirs is None and origin.kind == "file" and not origin.text):
            self.set(path, theirs, origin)
            self.origins |= {below: above.origins[below] for below, _ in walk(theirs, path)}
            self.shown |= {below: above.shown[below] for below, _ in walk(theirs, path) if below in above.shown}

    def leaves(self) -> Iterator[tuple[KeyPath, Any]]:
        """Yield path and value of everything that is not a mapping; an empty mapping counts as a value."""
        pending: list[tuple[KeyPath, Any]] = [((), self.data)]
        while pending:
            path, value = pending.pop()
            if isinstance(value, dict) and value:
                pending += [((*path, key), value[key]) for key in reversed(value)]
            else:
                yield path, value

    def as_displayed(self, path: str | KeyPath = ()) -> Any:
        """Return the data at a path with references and masks in place of the values that must not be shown."""
        parts = parts_of(path)
        value = self.get(parts)
        if parts in self.shown:
            return self.shown[parts]
        if isinstance(value, dict):
            return {key: self.as_displayed((*parts, key)) for key in value}
        return (
            [self.as_displayed((*parts, number)) for number in range(len(value))] if isinstance(value, list) else value
        )

    def shown_at(self, path: str | KeyPath) -> str | None:
        """Return what is shown in place of the value at a path; None: the value itself."""
        return self.shown.get(parts_of(path))

    def hides(self, path: str | KeyPath) -> bool:
        """Return whether the value at a path, or one below it, must not be shown."""
        parts = parts_of(path)
        return any(below[: len(parts)] == parts for below in self.shown)

    def describe(self, path: str | KeyPath) -> str:
        """Return a description of the value at a path, as :func:`describe_value`, without what must not be shown."""
        value = describe_value(self.get(path))
        if not self.hides(path):
            return value
        kind = value.rpartition(" (")[2].rstrip(")")
        return f"{describe_value(self.as_displayed(path)).rpartition(' (')[0]} ({kind})"


def parts_of(path: str | KeyPath) -> KeyPath:
    """Return the parts of a path that may be written as in messages: ``exp_manager.loggers[0].token``."""
    if isinstance(path, tuple):
        return path
    if "[" not in path:
        return tuple(path.split(".")) if path else ()
    return tuple(name or int(number) for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path))


def join(prefix: str, key: str) -> str:
    """Return the dotted path of ``key`` below ``prefix``."""
    return f"{prefix}.{key}" if prefix else key


def dotted(path: KeyPath) -> str:
    """Return a path as messages name it: ``exp_manager.loggers[0].token``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield plain data and all below it, each with its path; mappings and lists before what they hold."""
    yield path, value
    if isinstance(value, (dict, list)):
        for part, child in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(child, (dict, list)):
                yield from walk(child, (*path, part))
            else:  # most values: a generator for each would take most of the time
                yield (*path, part), child


def plain(value: Any) -> Any:
    """Return a copy of a value, such as a section's default, as dictionaries, lists and scalars."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True)
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    return str(value) if isinstance(value, PurePath) else value


def describe_value(value: Any) -> str:
    """Return a description of a found value: ``'12' (text)``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)) and not value:
        return "an empty list"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}…"
    return f"{text} ({'a list' if isinstance(value, (list, tuple)) else _FOUND.get(type(value), 'a value')})"


def parse_yaml(text: str, source: str, directory: Path | None = None) -> tuple[Tree, list[ConfigProblem]]:
    """Return the tree of a YAML document and what is wrong with it. An empty document is an empty mapping.

    Args:
        text: The document.
        source: What places in it are called.
        directory: Where its relative paths start.
    """
    document = _Document(source, directory)
    nothing = Tree({}, {(): document.origin(None)})
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # before anything recurses, which the parser itself does not
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > _MOST_LEVELS:
                    raise YamlTooLarge(**document.origin(event.start_mark).at(""), reason=_TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return nothing, []
        document.construct = loader.construct_object
        data = document.value(root, (), document.origin(root.start_mark))
        return Tree(data, document.origins), document.problems
    except UnicodeEncodeError as error:  # a command line whose bytes are not UTF-8
        reason = f"it holds half a character, {error.object[error.start]!r}"
        return nothing, [YamlSyntax(place=source, line=0, key="", reason=reason)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        parts = [getattr(error, "context", None), getattr(error, "problem", None)]
        reason = ", ".join(part for part in parts if part) or " ".join(str(error).split())
        if parts[0] == "while scanning an alias":
            reason = "'*' begins the name of an anchor there; quote a text that begins with it: '*.jsonl'"
        elif mark is not None and re.match(r" *\t", "".join(text.split("\n")[mark.line : mark.line + 1])):
            reason = "a tab indents the line, and YAML takes spaces alone"
        place = document.origin(mark).at("") if mark is not None else Place(place=source, line=0, key="")
        if "maximum nesting depth" in reason:  # libyaml 0.2.6 reads ahead, and is the first to notice
            return nothing, [YamlTooLarge(**place, reason=_TOO_DEEP)]
        return nothing, [YamlSyntax(**place, reason=reason)]
    except YamlTooLarge as problem:
        return nothing, [problem]


@dataclass(slots=True)
class _Document:
    """One pass over the nodes of one document."""

    source: str
    directory: Path | None
    problems: list[ConfigProblem] = field(default_factory=list)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """Identities of the collections that are being read: an anchor inside itself would never end."""
    count: int = 0
    """Values read so far; those of an alias count each time."""
    construct: Any = None
    """The loader's constructor of scalars."""

    def origin(self, mark: Any) -> Origin:
        line = 1 if mark is None else mark.line + 1
        return Origin(kind="file", where=f"{self.source}:{line}", line=line, directory=self.directory)

    def value(self, node: Any, path: KeyPath, origin: Origin) -> Any:
        """Return the plain value of a node and note its origin, which is the line of its key."""
        self.origins[path] = origin
        self.count += 1
        if self.count > _MOST_NODES:
            reason = f"with its aliases (*name) written out it has over {_MOST_NODES:,} values"
            raise YamlTooLarge(**self.origin(node.start_mark).at(""), reason=reason)
        if isinstance(node, yaml.ScalarNode):
            value = self._scalar(node, path, origin)
            if value is None or type(value) in (int, float):
                self.origins[path] = replace(origin, text=node.value)
            return value
        if id(node) in self.open:
            self._wrong(path, origin, "an anchor that contains itself", "values that end")
            return None
        if node.tag not in _COLLECTIONS:
            self._wrong(path, origin, *_tag_of(node))
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value = [
                self.value(item, (*path, number), self.origin(item.start_mark))
                for number, item in enumerate(node.value)
            ]
        else:
            value = self._mapping(node, path)
        self.open.remove(id(node))
        return value

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        """Return a mapping. What ``<<`` brings is below its own keys; of several such mappings the first wins."""
        content: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        brought = [value for key, value in node.value if key.tag == _MERGE]
        parts = [
            part for source in brought for part in (source.value if isinstance(source, yaml.SequenceNode) else [source])
        ]
        for mapping in reversed(parts):
            value = self.value(mapping, path, self.origins[path])
            if isinstance(value, dict):
                content |= value
            else:
                origin = self.origin(mapping.start_mark)
                self._wrong((*path, "<<"), origin, "no mapping", "a mapping or a list of mappings")
        for key, value in node.value:
            origin = self.origin(key.start_mark)
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(path, origin, "a key that is a list or mapping", "keys that are text")
                continue
            name = key.value  # the text, so that `on:` and `1:` are keys as written
            if name in origins:
                place = origin.at(dotted((*path, name)))
                self.problems.append(DuplicateKey(**place, first=origins[name].where))
            origins[name] = origin
            content[name] = self.value(value, (*path, name), origin)
        return content

    def _scalar(self, node: Any, path: KeyPath, origin: Origin) -> Any:
        if node.tag in _TEXTS:
            unquoted = node.style is None or node.style == ""
            return float(node.value.replace("_", "")) if unquoted and _FLOAT.fullmatch(node.value) else node.value
        if node.tag not in _SCALARS:
            self._wrong(path, origin, *_tag_of(node))
            return None
        if ":" in node.value:  # YAML 1.1 reads 1:30 as the number 90
            return node.value
        try:
            value = int(node.value.replace("_", "")) if _DECIMAL.fullmatch(node.value) else self.construct(node)
            if isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
                raise ValueError
            return value
        except (yaml.YAMLError, ValueError):  # an explicit tag on text that is none (`!!int x`), or too many digits
            text = node.value if len(node.value) <= _SHOWN else f"{node.value[:_SHOWN]}…"
            if _INTEGER.fullmatch(node.value):
                self._wrong(path, origin, text, f"integers from {-LARGEST_INTEGER - 1} to {LARGEST_INTEGER}")
            else:
                self._wrong(path, origin, f"{text!r} tagged {node.tag.replace(_TAG, '!!')}", "a value of that type")
            return None

    def _wrong(self, path: KeyPath, origin: Origin, found: str, allowed: str) -> None:
        self.problems.append(WrongValue(**origin.at(dotted(path)), found=found, allowed=allowed))


def _tag_of(node: Any) -> tuple[str, str]:
    """Return what is found and what is allowed where a node has a tag that is not of plain data."""
    return f"the tag {node.tag.replace(_TAG, '!!')}", "plain values without tags"
