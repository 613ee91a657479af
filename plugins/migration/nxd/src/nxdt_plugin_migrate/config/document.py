"""A file of another program as settings by key path, with comments and the text of values, and as YAML again.

PyYAML drops comments and the original text of values, so both are found by the marks of its tokens and nodes. In the
new file sections are nested again, comments are where they were, and interpolations name the keys of today.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from nxdt_core.config import PlainFile
from nxdt_core.protocols.migration import MigratedKey, Verdict

TO_SET = "???"
"""OmegaConf's mark of a value that must be given."""

_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
"""An interpolation of another key: ``${section.key}`` or ``${.key}``. One of a resolver has a colon."""


def entries(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key path and value of everything below, sections before what is in them."""
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        yield here, value
        if is_section(value):
            yield from entries(value, here)


def is_section(value: object) -> bool:
    """Return whether a value is a mapping that has keys; an empty one counts as a value."""
    return isinstance(value, Mapping) and bool(value)


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
    written: Any = None
    """The value in the file, with interpolations."""
    override: int = 0
    """Place among the overrides that set keys, counted from 1; 0: the file sets it."""
    at_line_end: str = ""
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
        setting = self.settings.get(path)
        return default if setting is None else setting.value

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
        """Add a reason to a key that stays as it is."""
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
                    other.text, other.written = setting.text, setting.written
                origin = "the command line" if other.override else f"line {other.line}"
                why = f"{origin} says the same" if same else f"it is the setting {new}, for which {origin} counts"
                self.moved[setting.source] = new
                self.drop(old, "unneeded" if same else "ignored", why)
                continue
            setting.verdict = "renamed"
            if reason:
                setting.reasons.append(reason)
            self.moved[setting.source] = new
            self.settings = {new if key == old else key: moved for key, moved in self.settings.items()}

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
        settled = [
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
        yield from sorted([*settled, *self.left_out], key=lambda row: (row.line == 0, row.line))


def _shown(setting: Setting) -> str:
    now = "null" if setting.value is None else str(setting.value)
    return {"added": now, "changed": f"{setting.original} → {now}"}.get(setting.verdict, setting.original)


def read_document(file: PlainFile, overrides: Collection[str] = ()) -> Document:
    """Return a document that says what the file says, with the values of ``overrides``, which it has."""
    order = {path: place for place, path in enumerate(overrides, 1)}
    texts: dict[str, str] = {}
    _collect(yaml.compose(file.text, Loader=yaml.SafeLoader), "", file.text, texts)
    at_line_end, above = _comments(file.text)
    meant = dict(entries(file.resolved))
    settings: dict[str, Setting] = {}
    sections: dict[str, int] = {}
    headings: dict[str, tuple[str, ...]] = {}
    for path, value in entries(file.written):
        line = file.lines[path]
        if is_section(value):
            sections[path], headings[path] = line, above.pop(line, ())
            continue
        reference = json.dumps(value) if isinstance(value, str) and "${" in value else None
        text = reference if path in order else texts.get(path)
        settings[path] = Setting(
            source=path,
            line=line,
            value=meant[path],
            written=value,
            text=text,
            original=text if text is not None else str(value),
            override=order.get(path, 0),
            at_line_end=at_line_end.pop(line, ""),  # of several keys on a line, the first has the comment
            above=above.pop(line, ()),
        )
    return Document(settings, headings, sections)


def _comments(text: str) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
    lines = text.splitlines()
    ends: dict[int, int] = {}
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if token.end_mark.column and not isinstance(token, (yaml.BlockEndToken, yaml.StreamEndToken)):
            ends[token.end_mark.line] = max(ends.get(token.end_mark.line, 0), token.end_mark.column)
    at_line_end: dict[int, str] = {}
    above: dict[int, tuple[str, ...]] = {}
    pending: list[str] = []
    for number, line in enumerate(lines):
        rest = line[ends.get(number, 0) :].strip()
        if number in ends:
            if rest.startswith("#"):
                at_line_end[number + 1] = rest
            if pending:
                above[number + 1] = tuple(pending)
            pending = []
        elif rest.startswith("#"):
            pending.append(rest)
        elif not rest:
            pending = []  # comments before a blank line belong to no key
    return at_line_end, above


def _collect(node: Any, path: str, text: str, values: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            name = str(key.value)
            _collect(value, f"{path}.{name}" if path else name, text, values)
    elif path and isinstance(node, (yaml.ScalarNode, yaml.SequenceNode)):
        source = text[node.start_mark.index : node.end_mark.index]
        # The text means the same elsewhere unless it is a block, or contains an anchor or an alias.
        if isinstance(node, yaml.SequenceNode):
            alone = bool(node.flow_style) and not set("&*\n") & set(source)
        else:
            alone = node.style in (None, "'", '"') and "\n" not in source and source[:1] not in ("", "&", "!")
        if alone:
            values[path] = source


def render(document: Document, head: tuple[str, ...], tail: tuple[str, ...]) -> str:
    """Return the YAML text of the settings between ``head`` and ``tail``, which are lines of comments."""
    tree = _nested(document.settings)
    lines = [*_comment_lines(head, ""), *_lines(tree, "", document), *(("", *_comment_lines(tail, "")) if tail else ())]
    return "\n".join(lines) + "\n"


def _lines(tree: dict[str, Any], path: str, document: Document) -> list[str]:
    depth = path.count(".") + 1 if path else 0
    indent = "  " * depth
    lines: list[str] = []
    apart = False
    for name, child in tree.items():
        here = f"{path}.{name}" if path else name
        if isinstance(child, Setting):
            text = f"{indent}{dump(name)}: {_text(child, here, document)}"
            lines += [""] if apart else []
            apart = False
            lines += [*_comment_lines(child.above, indent), f"{text} {child.at_line_end}".rstrip()]
        else:
            apart = depth == 0
            lines += [""] if apart else []
            lines += [*_comment_lines(document.headings.get(here, ()), indent), f"{indent}{dump(name)}:"]
            lines += _lines(child, here, document)
    return lines


def _comment_lines(lines: tuple[str, ...], indent: str) -> list[str]:
    return [f"{indent}{line if line.startswith('#') else f'# {line}'}".rstrip() for line in lines]


def plain(document: Document) -> dict[str, Any]:
    """Return the values that the YAML text has, nested."""
    values = {path: setting.value for path, setting in document.settings.items()}
    for path, setting in document.settings.items():
        if setting.text is not None and "${" in setting.text:
            pointed = _pointed(setting.written, setting, path, document)
            values[path] = setting.value if pointed is None else pointed
    return _nested(values)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return tree


def _text(setting: Setting, path: str, document: Document) -> str:
    if setting.text is None or "${" not in setting.text:
        return dump(setting.value) if setting.text is None else setting.text
    pointed = _pointed(setting.text, setting, path, document)
    return dump(setting.value) if pointed is None else str(pointed)


def _pointed(value: Any, setting: Setting, path: str, document: Document) -> Any:
    """Return a value whose interpolations name the keys of today; None where one names a key that is gone."""
    lost = False

    def today(match: re.Match[str]) -> str:
        nonlocal lost
        # One dot is the section that contains the interpolation.
        around = setting.source.split(".")[: -len(match[1])] if match[1] else []
        target = ".".join([*around, match[2]])
        now = document.moved.get(target, target)
        lost = lost or not document.has(now)
        neighbours = now.rpartition(".")[0] == path.rpartition(".")[0]
        return f"${{.{now.rpartition('.')[2]}}}" if match[1] and neighbours else f"${{{now}}}"

    def pointed(value: Any) -> Any:
        if isinstance(value, list):
            return [pointed(item) for item in value]
        return _REFERENCE.sub(today, value) if isinstance(value, str) else value

    result = pointed(value)
    return None if lost else result


def dump(value: object) -> str:
    """Return one value on one line."""
    if value == TO_SET:  # as OmegaConf's users write it; the dumper would quote it
        return TO_SET
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
