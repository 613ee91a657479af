"""The treatment of every key of NxD Training, from the table, the schema and the plugins themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from nxdt_plugin_migrate.config.document import dump
from nxdt_plugin_migrate.config.nxdt_keys import DATA_READERS, IGNORED, nxdt_keys
from nxdt_plugin_migrate.config.renamed_keys import (
    ALIGNMENT,
    GONE,
    NEUTRAL,
    OF_ENGINE,
    RENAMED,
    SAID_BY,
    SECTIONS,
    current_name,
    why_unneeded,
)

from nxdt_core.config.schema import SLOTS, RunConfig, usable_class
from nxdt_core.config.section import Key, keys_of
from nxdt_core.config.tree import join
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import either
from nxdt_core.kernel import Kernel, RegisteredComponent

Status = Literal["implemented", "renamed", "engine nxd", "unneeded", "refused"]

_WORDS: dict[Status, str] = {
    "implemented": "means here what it means there",
    "renamed": "the key that is named says it here",
    "engine nxd": "the engine `nxd` has it, as the key that is named; other engines need no such key",
    "unneeded": "left out; the remark says why nothing is lost without it",
    "refused": "nothing here does it; left out with a remark, or an error where the architecture would be another",
}


PRECISIONS = ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR", "bf16SR", "fp32", "autocast", "manual")
"""Values of ``precision.type``."""

OPTIMIZERS = ("adamw", "adamw_fp32OptState", "sgd", "adam", "adadelta", "adamax", "adagrad", "rmsprop", "rprop",
              "novograd", "adafactor")  # fmt: skip
"""Values of ``model.optim.name``."""

SCHEDULES = ("LinearAnnealingWithWarmUp", "CosineAnnealing", "WarmupPolicy", "WarmupHoldPolicy", "SquareAnnealing",
             "NoamAnnealing", "WarmupAnnealing", "StepLR", "ExponentialLR")  # fmt: skip
"""Values of ``model.optim.sched.name``."""

_PROMPTS = "prompts of promptsource are not filled in; sft-chat reads files with inputs and outputs, or whole chats"

UNDONE: Mapping[str, str] = {f"data.{name}_name": _PROMPTS for name in ("dataset", "subset", "prompt")}
"""Keys that nothing here reads → why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatus:
    """A row of the table."""

    key: str
    status: Status
    target: str = ""
    """The equivalent key here, for a renamed key."""
    reason: str = ""
    """Explanation; empty where the status is enough."""


@cache
def core_keys() -> dict[str, Key]:
    """Return every key of the core's schema by path, sections included."""
    return dict(_walk(RunConfig, ""))


def _walk(cls: type, path: str) -> Iterator[tuple[str, Key]]:
    for name, key in keys_of(cls).items():
        here = join(path, name)
        yield here, key
        if key.section is not None:
            yield from _walk(key.section, here)


def schema_table(kernel: Kernel) -> tuple[KeyStatus, ...]:
    """Return a row with the status of every key of NxD Training 1.6 under the plugins of ``kernel``."""
    declared = declared_keys(kernel)
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
                    status="refused" if found is None else "implemented" if kept else "renamed",
                    target="" if found is None or kept else found.record.name,
                    reason=f"no plugin here offers a {kind} of that name" if found is None else "",
                )
            )
    return tuple(rows)


def _status(key: str, declared: dict[str, list[tuple[str, Key]]], kernel: Kernel) -> KeyStatus:
    if (name := RENAMED.get(key) or SAID_BY.get(key)) is not None:
        return KeyStatus(key=key, status="renamed", target=name)
    if key in OF_ENGINE:
        return KeyStatus(key=key, status="engine nxd", target=OF_ENGINE[key])
    if key.startswith("model_alignment_strategy."):
        return _alignment_status(key, declared, kernel)
    if key in declared:
        names = ", ".join(reader for reader, _ in declared[key])
        return KeyStatus(key=key, status="implemented", reason="" if key in core_keys() else f"by {names}")
    if key in core_keys():
        return KeyStatus(key=key, status="implemented")
    name = current_name(key, declared)
    if name is not None:
        return KeyStatus(key=key, status="renamed", target=name)
    if key in GONE:
        return KeyStatus(key=key, status="unneeded", reason=GONE[key])
    return KeyStatus(key=key, status="refused", reason=_unread(key, kernel))


def _alignment_status(key: str, declared: dict[str, list[tuple[str, Key]]], kernel: Kernel) -> KeyStatus:
    part, _, name = key.removeprefix("model_alignment_strategy.").partition(".")
    section, component = SECTIONS[part]
    target = ALIGNMENT.get(key, f"{section}.{name}")
    if target in GONE:
        return KeyStatus(key=key, status="unneeded", reason=GONE[target])
    slot = next(slot for slot in SLOTS if slot.section == section)
    missing = component is not None and _find(kernel, slot.kind, component) is None
    if missing or target not in declared:
        wanted = f"{slot.key}: {component or 'sft-chat'}"
        return KeyStatus(key=key, status="refused", target=target, reason=f"no plugin here offers {wanted}")
    return KeyStatus(key=key, status="renamed", target=target)


def _unread(key: str, kernel: Kernel) -> str:
    if key in UNDONE:
        return UNDONE[key]
    readers = [name for name, keys in DATA_READERS.items() if key.removeprefix("data.") in keys]
    readers = [name for name in readers if _find(kernel, "dataset", name) is None]
    if key.startswith("data.") and readers:
        return f"no plugin here offers data.name: {either(readers)}"
    neutral, reason = NEUTRAL.get(key, ((), ""))
    if reason:
        return f"{reason}; {dump(neutral[0] if neutral else None)} asks for nothing"
    why = None if key in NEUTRAL else why_unneeded(key)
    return why[0] if why else f"no {'model' if key.startswith('model.') else 'component'} here reads it"


def _remarked(row: KeyStatus) -> KeyStatus:
    """The row, with what NxD Training itself makes of the key."""
    ignored = IGNORED.get(row.key)
    if ignored is None or ignored in row.reason:
        return row
    reason = row.reason if "never read" in row.reason else f"{row.reason}; {ignored}".removeprefix("; ")
    return replace(row, reason=reason)


def _find(kernel: Kernel, kind: str, name: str) -> RegisteredComponent | None:
    try:
        return kernel.registry.get(kind, name)
    except NxdtError:
        return None


def declared_keys(kernel: Kernel) -> dict[str, list[tuple[str, Key]]]:
    """Return, by key path, the components that declare it."""
    found: dict[str, list[tuple[str, Key]]] = {}
    for slot in SLOTS:
        for component in kernel.registry.all(slot.kind):
            try:
                cls = usable_class(component)
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
        "Each key of NxD Training 1.6 and what it means here, with the plugins of this repository. Where a file of NxD",
        "Training is read, `nxdt-plugin-migrate` treats its keys so, and `nxdt config migrate` writes the result.",
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
