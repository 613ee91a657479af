"""The treatment of every key of NxD Training, from the schema and the plugins themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from nxdt_core.config.annotations import AliasOf, NoEffect, XlaOnly
from nxdt_core.config.fields.component_slots import SLOTS
from nxdt_core.config.fields.extensions import FLAGS
from nxdt_core.config.fields.keys import Key, keys_of
from nxdt_core.config.resolve.alignment import SECTION, TARGETS, target_of
from nxdt_core.config.resolve.select import usable_class
from nxdt_core.config.sources.node import join
from nxdt_core.config.validate.unsupported import RULES
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import either
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_plugin_migrate.config.aliases import core_keys, legacy_keys
from nxdt_plugin_migrate.config.nxdt_keys import (
    DATA_READERS,
    IGNORED,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    UNDONE,
    nxdt_keys,
)
from nxdt_plugin_migrate.config.renamed_keys import RENAMED, why_unneeded
from nxdt_plugin_migrate.config.render import dump

__all__ = ["KeyStatus", "Status", "schema_page", "schema_table", "value_table"]

Status = Literal["implemented", "alias", "renamed", "XLA runtime only", "unneeded", "refused"]

_WORDS: dict[Status, str] = {
    "implemented": "means here what it means there",
    "alias": "accepted; it sets the key that is named",
    "renamed": "`nxdt config migrate` writes the key that is named",
    "XLA runtime only": "accepted; engines of that runtime read it, and with others a note says that it has no effect",
    "unneeded": "accepted; a note says why it has no effect",
    "refused": "an error says why, unless it has the value that asks for nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatus:
    """A row of the table."""

    key: str
    status: Status
    target: str = ""
    """The equivalent key here, for an alias or a renamed key."""
    reason: str = ""
    """Explanation; empty where the status is enough."""


def schema_table(kernel: Kernel) -> tuple[KeyStatus, ...]:
    """Return a row with the status of every key of NxD Training 1.6 under the plugins of ``kernel``."""
    declared = _declared_keys(kernel)
    return tuple(_remarked(_status(key, declared, kernel)) for key in nxdt_keys())


def value_table(kernel: Kernel) -> tuple[KeyStatus, ...]:
    """Return the same for names that select a component: precisions, optimizers and schedules."""
    names = (("precision.type", PRECISIONS), ("model.optim.name", OPTIMIZERS), ("model.optim.sched.name", SCHEDULES))
    rows = []
    for key, values in names:
        kind = next(slot.kind for slot in SLOTS if slot.key == key)
        for value in values:
            found = _find(kernel, kind, value)
            kept = found is not None and found.record.name == value
            rows.append(
                KeyStatus(
                    key=f"{key}: {value}",
                    status="refused" if found is None else "implemented" if kept else "alias",
                    target="" if found is None or kept else found.record.name,
                    reason=f"no plugin here offers a {kind} of that name" if found is None else "",
                )
            )
    return tuple(rows)


def _status(key: str, declared: dict[str, list[tuple[str, Key]]], kernel: Kernel) -> KeyStatus:
    if key in RENAMED:
        return KeyStatus(key=key, status="renamed", target=RENAMED[key], reason="an older name of the same number")
    if key.startswith(f"{SECTION}."):
        return _alignment_status(key, declared, kernel)
    if key in declared:
        return _component_status(key, declared[key])
    core = core_keys().get(key) or legacy_keys().get(key)
    if core is not None and (marked := _marked(key, core)):
        return marked
    rule = next((rule for rule in RULES if rule.key == key), None)
    if rule is not None:
        return KeyStatus(key=key, status="refused", reason=f"{rule.reason}; {dump(rule.neutral[0])} asks for nothing")
    logger = next((name for name in FLAGS if key == f"exp_manager.create_{name}_logger"), None)
    if logger is not None and _find(kernel, "callback", logger) is None:
        return KeyStatus(key=key, status="refused", reason=f"no plugin here offers the logger {logger}")
    if key in core_keys():
        return KeyStatus(key=key, status="implemented")
    return KeyStatus(key=key, status="refused", reason=_unread(key, kernel))


def _marked(key: str, declared: Key) -> KeyStatus | None:
    alias, dead = declared.mark(AliasOf), declared.mark(NoEffect)
    if alias is not None:
        return KeyStatus(key=key, status="alias", target=alias.key)
    if dead is not None:
        return KeyStatus(key=key, status="unneeded", reason=dead.reason)
    return KeyStatus(key=key, status="XLA runtime only") if declared.mark(XlaOnly) is not None else None


def _component_status(key: str, readers: list[tuple[str, Key]]) -> KeyStatus:
    names = ", ".join(name for name, _ in readers)
    marked = [_marked(key, each) for _, each in readers]
    status = marked[0]
    if status is not None and all(marked):
        # Another component takes the key only where the older schema says that it does nothing.
        elsewhere = legacy_keys().get(key)
        everywhere = key in core_keys() or (elsewhere is not None and bool(elsewhere.marks))
        reasons = (status.reason, "" if everywhere and status.reason else f"by {names}")
        return replace(status, reason="; ".join(reason for reason in reasons if reason))
    return KeyStatus(key=key, status="implemented", reason="" if key in core_keys() else f"by {names}")


def _alignment_status(key: str, declared: dict[str, list[tuple[str, Key]]], kernel: Kernel) -> KeyStatus:
    part, _, name = key.removeprefix(f"{SECTION}.").partition(".")
    section, component = TARGETS[part]
    target = target_of(part, name)
    slot = next(slot for slot in SLOTS if slot.section == section)
    missing = component is not None and _find(kernel, slot.kind, component) is None
    if missing or target not in declared:
        wanted = f"{slot.key}: {component or 'sft-chat'}"
        return KeyStatus(key=key, status="refused", target=target, reason=f"no plugin here offers {wanted}")
    return KeyStatus(key=key, status="alias", target=target)


def _unread(key: str, kernel: Kernel) -> str:
    known = UNDONE.get(key) or why_unneeded(key)
    if known:
        return known
    readers = [name for name, keys in DATA_READERS.items() if key.removeprefix("data.") in keys]
    readers = [name for name in readers if _find(kernel, "dataset", name) is None]
    if key.startswith("data.") and readers:
        return f"no plugin here offers data.name: {either(readers)}"
    return f"no {'model' if key.startswith('model.') else 'component'} here reads it"


def _remarked(row: KeyStatus) -> KeyStatus:
    """The row, with what NxD Training itself makes of the key."""
    ignored = IGNORED.get(row.key)
    if ignored is None:
        return row
    reason = row.reason if "never read" in row.reason else f"{row.reason}; {ignored}".removeprefix("; ")
    return replace(row, reason=reason)


def _find(kernel: Kernel, kind: str, name: str) -> RegisteredComponent | None:
    try:
        return kernel.registry.get(kind, name)
    except NxdtError:
        return None


def _declared_keys(kernel: Kernel) -> dict[str, list[tuple[str, Key]]]:
    """Return, by key path, the components that declare it."""
    found: dict[str, list[tuple[str, Key]]] = {}
    for slot in SLOTS:
        for component in kernel.registry.all(slot.kind):
            try:
                cls = usable_class(component, {"place": component.dist, "line": 0, "key": slot.key})
            except NxdtError:  # 'nxdt plugins show' reports the reason
                continue
            for path, key in _keys_below(cls, slot.section):
                found.setdefault(path, []).append((component.record.name, key))
    return found


def _keys_below(cls: type | None, path: str) -> Iterator[tuple[str, Key]]:
    for name, key in (keys_of(cls) if cls is not None else {}).items():
        here = join(path, name)
        yield here, key
        if key.section is not None and key.section is not cls:
            yield from _keys_below(key.section, here)


def schema_page(kernel: Kernel) -> str:
    """Return the table as a page of the documentation."""
    lines = [
        "# Keys of NxD Training",
        "",
        "Each key of NxD Training 1.6 and what it means here, with the plugins of this repository. The tables are",
        "written from the schema itself, and `nxdt config check` holds to them.",
        "",
        "| status | meaning |",
        "|---|---|",
        *(f"| {status} | {words} |" for status, words in _WORDS.items()),
        "",
        "## Keys",
        "",
        *_rows(schema_table(kernel), "key"),
        "",
        "## Names of components",
        "",
        *_rows(value_table(kernel), "value"),
    ]
    return "\n".join(lines) + "\n"


def _rows(table: tuple[KeyStatus, ...], what: str) -> Iterator[str]:
    yield from (f"| {what} | status | here | remarks |", "|---|---|---|---|")
    for row in table:
        target = f"`{row.target}`" if row.target else ""
        yield f"| `{row.key}` | {row.status} | {target} | {row.reason} |"
