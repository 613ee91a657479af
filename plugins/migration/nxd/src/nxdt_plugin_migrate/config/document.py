"""Reads what PyYAML drops from a file: comments, and the original text of each value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from nxdt_core.config.read import UNRESOLVED, interpolate
from nxdt_core.config.tree import Tree, dotted, join, walk
from nxdt_core.protocols.migration import MigratedKey, Verdict


@dataclass(frozen=True, slots=True)
class Comments:
    """Comments and value texts of a YAML file. Lines are counted from 1."""

    beside: dict[int, str] = field(default_factory=dict)
    """Line → the comment at its end."""
    above: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Line → the lines of comments directly above it."""
    values: dict[str, str] = field(default_factory=dict)
    """Key path → the value's original text, if it is on one line and has the same meaning anywhere in the file."""


def read_comments(text: str) -> Comments:
    """Return comments and value texts of a document that has been parsed before and is known to be valid."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    values: dict[str, str] = {}
    _collect(root, "", text, values)
    return Comments(*_comments(text), values)


def _comments(text: str) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
    lines = text.splitlines()
    ends: dict[int, int] = {}
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if token.end_mark.column and not isinstance(token, (yaml.BlockEndToken, yaml.StreamEndToken)):
            ends[token.end_mark.line] = max(ends.get(token.end_mark.line, 0), token.end_mark.column)
    beside: dict[int, str] = {}
    above: dict[int, tuple[str, ...]] = {}
    pending: list[str] = []
    for number, line in enumerate(lines):
        rest = line[ends.get(number, 0) :].strip()
        if number in ends:
            if rest.startswith("#"):
                beside[number + 1] = rest
            if pending:
                above[number + 1] = tuple(pending)
            pending = []
        elif rest.startswith("#"):
            pending.append(rest)
        elif not rest:
            pending = []  # comments before a blank line belong to no key
    return beside, above


def _collect(node: Any, path: str, text: str, values: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            _collect(value, join(path, str(key.value)), text, values)
    elif path and isinstance(node, (yaml.ScalarNode, yaml.SequenceNode)):
        own = text[node.start_mark.index : node.end_mark.index]
        # The text means the same elsewhere unless it is a block, or contains an anchor or an alias.
        if isinstance(node, yaml.SequenceNode):
            alone = bool(node.flow_style) and not set("&*\n") & set(own)
        else:
            alone = node.style in (None, "'", '"') and "\n" not in own and own[:1] not in ("", "&", "!")
        if alone:
            values[path] = own


@dataclass(slots=True, kw_only=True)
class Setting:
    """One key that is not a section, and its value."""

    source: str
    """Key path in the file; empty for one that was added."""
    line: int
    value: Any
    """Plain value, with interpolations resolved."""
    text: str | None
    """The value's text in the file; None for a value to be dumped."""
    original: str
    """Value in the report."""
    override: int = 0
    """Place among the overrides that set keys, counted from 1; 0: the file sets it."""
    beside: str = ""
    above: tuple[str, ...] = ()
    verdict: Verdict = "mapped"
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Document:
    """Settings by key path, in the order in which they will be written."""

    settings: dict[str, Setting]
    headings: Mapping[str, tuple[str, ...]]
    """Comments above sections, by key path."""
    lines: Mapping[str, int]
    """First line of each section of the file, by key path."""
    left_out: list[MigratedKey] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    """Key path in the file → the one that it has now, or that of the key that says the same."""

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` where it is not there."""
        found = self.settings.get(path)
        return default if found is None else found.value

    def below(self, section: str) -> list[str]:
        """Return the key paths of a section, at any depth; that of the key itself where it is not a section."""
        return [path for path in self.settings if path == section or path.startswith(f"{section}.")]

    def has(self, section: str) -> bool:
        """Return whether the key, or anything below it, is there."""
        return bool(self.below(section))

    def asks(self, section: str) -> bool:
        """Return whether the key, or anything below it, has a value that switches something on or chooses something."""
        return any(self.settings[path].value not in (None, False, 0, "", [], {}) for path in self.below(section))

    def remark(self, path: str, reason: str) -> None:
        """Say something about a key that stays as it is."""
        self.settings[path].reasons.append(reason)

    def move(self, path: str, target: str, reason: str = "") -> None:
        """Give a key, or all keys of a section, another path.

        An existing value takes precedence, unless the command line sets the key alone.
        """
        for old in self.below(path):
            new = target + old.removeprefix(path)
            setting, other = self.settings[old], self.settings.get(new)
            if other is not None and setting.override > other.override:
                self.moved[other.source] = new
                self.drop(new, "ignored", f"it is the setting {new}, for which the command line counts")
            elif other is not None:
                same = setting.value == other.value
                if same and other.text is not None and "${" in other.text:  # perhaps a reference to the key that goes
                    other.text = setting.text
                there = "the command line" if other.override else f"line {other.line}"
                why = f"{there} says the same" if same else f"it is the setting {new}, for which {there} counts"
                self.moved[setting.source] = new
                self.drop(old, "unneeded" if same else "ignored", why)
                continue
            setting.verdict = "renamed"
            if reason:
                setting.reasons.append(reason)
            self.moved[setting.source] = new
            self.settings = {new if key == old else key: each for key, each in self.settings.items()}

    def change(self, path: str, value: Any, reason: str) -> None:
        """Give a key another value."""
        setting = self.settings[path]
        setting.value, setting.text, setting.verdict = value, None, "changed"
        setting.reasons.append(reason)

    def put(self, path: str, value: Any, reason: str) -> None:
        """Add a key that the file lacks; nothing where it has it. A name comes first in its section."""
        if path in self.settings:
            return
        added = Setting(source="", line=0, value=value, text=None, original="", verdict="added", reasons=[reason])
        section, _, name = path.rpartition(".")
        place = next(iter(self.below(section)), None) if name in ("name", "type") else None
        if place is None:
            self.settings[path] = added
            return
        before = list(self.settings).index(place)
        entries = list(self.settings.items())
        self.settings = dict([*entries[:before], (path, added), *entries[before:]])

    def drop(self, path: str, verdict: Verdict, reason: str) -> None:
        """Leave out a key, or a whole section in one line of the report."""
        below = self.below(path)
        if not below:
            return
        gone = [self.settings.pop(key) for key in below]
        key, value = gone[0].source or path, gone[0].original
        if below != [path]:
            key = key.removesuffix(below[0].removeprefix(path))
            value = value if len(gone) == 1 else f"{len(gone)} keys"
        line = self.lines.get(key, gone[0].line)
        if not gone[0].source:  # it was added before
            return
        self.left_out.append(MigratedKey(key=key, line=line, verdict=verdict, value=value, reason=reason))

    def report(self) -> Iterator[MigratedKey]:
        """Yield the report, in the order of the file; added keys come last."""
        kept = [
            MigratedKey(
                key=setting.source or path,
                line=setting.line,
                verdict=setting.verdict,
                target=path if setting.source not in ("", path) else "",
                value=_shown(setting),
                reason="; ".join(setting.reasons),
            )
            for path, setting in self.settings.items()
        ]
        yield from sorted([*kept, *self.left_out], key=lambda row: (row.line == 0, row.line))


def _shown(setting: Setting) -> str:
    now = "null" if setting.value is None else str(setting.value)
    return {"added": now, "changed": f"{setting.original} → {now}"}.get(setting.verdict, setting.original)


def read_document(tree: Tree, written: Comments, overrides: Collection[str] = ()) -> Document:
    """Return a document that says what the file says, with the values of ``overrides``, which are in the tree."""
    order = {path: place for place, path in enumerate(overrides, 1)}
    resolved = tree.copy()
    interpolate(resolved)
    beside, above = dict(written.beside), dict(written.above)
    lines = {
        dotted(path): tree.origins[path].line
        for path, value in walk(tree.data)
        if path and value and isinstance(value, dict)
    }
    headings = {path: above.pop(line, ()) for path, line in lines.items()}
    settings: dict[str, Setting] = {}
    for at, value in tree.leaves():
        path, line, meant = dotted(at), tree.origins[at].line, resolved.get(at)
        reference = json.dumps(value) if isinstance(value, str) and "${" in value else None
        text = reference if path in order else written.values.get(path)
        settings[path] = Setting(
            source=path,
            line=line,
            value=value if meant is UNRESOLVED else meant,
            text=text,
            original=text if text is not None else str(value),
            override=order.get(path, 0),
            beside=beside.pop(line, ""),  # of several keys on a line, the first has the comment
            above=above.pop(line, ()),
        )
    return Document(settings, headings, lines)
