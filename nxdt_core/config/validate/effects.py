"""Settings that are accepted and do nothing: one line for each reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nxdt_core.config.annotations import Deprecated, NoEffect, XlaOnly
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.fields.keys import REQUIRED, Key, keys_of
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import from_plain, join, to_plain
from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.unused import find_idle
from nxdt_core.deprecation import deprecation_text

__all__ = ["find_notes"]

_CACHE, _COMPILE = "compiler_cache_url", "model.compile"


def find_notes(checked: Checked, composition: Composition, legacy: Iterable[tuple[str, Key]]) -> tuple[str, ...]:
    """Return the lines that name keys without an effect. ``legacy`` are keys that reading set aside."""
    engine = composition.components.get("engine")
    reads_xla = engine is not None and "xla" in engine.record.capabilities
    engine_name = engine.record.name if engine is not None else "this"
    reasons: dict[str, list[str]] = {}
    notes: list[str] = []
    components = (found for section, cls in composition.classes.items() for found in _set_keys(cls, section, checked))
    for path, key in (*_set_keys(RunConfig, "", checked), *components, *legacy):
        dead, xla, going = key.mark(NoEffect), key.mark(XlaOnly), key.mark(Deprecated)
        if going is not None:
            notes.append(deprecation_text(path, use=going.use, goes=going.goes))
        if dead is not None:
            reasons.setdefault(dead.reason, []).append(path)
        elif xla is not None and not reads_xla:
            reasons.setdefault(f"the engine {engine_name!r} does not read the XLA runtime's settings", []).append(path)
    notes += [_line(paths, reason) for reason, paths in reasons.items()]
    if not reads_xla and checked.values.get(_CACHE) is not None and not checked.values.get(_COMPILE):
        notes.append(_line([_CACHE], f"{_COMPILE} is false"))
    return (*notes, *find_idle(checked, composition.classes))


def _line(paths: list[str], reason: str) -> str:
    return f"{', '.join(paths)}: no effect, since {reason}"


def _set_keys(cls: type, path: str, checked: Checked) -> Iterator[tuple[str, Key]]:
    """Marked keys of a section's class whose value differs from the default, or that are deprecated and set."""
    for name, key in keys_of(cls).items():
        where = join(path, name)
        node = checked.tree.find(where)
        if node is None:
            continue
        if key.section is not None and isinstance(node.value, dict):
            yield from _set_keys(key.section, where, checked)
        elif any(key.mark(kind) for kind in (NoEffect, XlaOnly, Deprecated)) and node.origin.kind not in (
            "default",
            "alias",
        ):
            default = None if key.default is REQUIRED else to_plain(from_plain(key.default, node.origin))
            if to_plain(node) != default or key.mark(Deprecated):
                yield where, key
