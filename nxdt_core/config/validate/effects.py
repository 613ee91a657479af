"""Settings that are accepted and do nothing, or are about to go: one line for each reason."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.annotations import Deprecated
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.fields.keys import Key, keys_of
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import join
from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.unused import find_idle
from nxdt_core.deprecation import deprecation_text

__all__ = ["find_notes"]

_CACHE, _COMPILE, _LNC = "compiler_cache_url", "model.compile", "trainer.lnc"


def find_notes(checked: Checked, composition: Composition) -> tuple[str, ...]:
    """Return the lines that name keys without an effect, and those that are deprecated."""
    engine = composition.components.get("engine")
    xla = engine is not None and "xla" in engine.record.capabilities
    components = (found for section, cls in composition.classes.items() for found in _deprecated(cls, section, checked))
    notes = [
        deprecation_text(path, use=mark.use, goes=mark.goes)
        for path, key in (*_deprecated(RunConfig, "", checked), *components)
        if (mark := key.mark(Deprecated)) is not None
    ]
    if engine is not None and not xla and checked.values.get(_LNC) is not None:
        notes.append(f"{_LNC}: no effect, since the engine {engine.record.name!r} does not read it")
    if not xla and checked.values.get(_CACHE) is not None and not checked.values.get(_COMPILE):
        notes.append(f"{_CACHE}: no effect, since {_COMPILE} is false")
    return (*notes, *find_idle(checked, composition.classes))


def _deprecated(cls: type, path: str, checked: Checked) -> Iterator[tuple[str, Key]]:
    """Deprecated keys of a section's class that are set."""
    for name, key in keys_of(cls).items():
        where = join(path, name)
        node = checked.tree.find(where)
        if node is None:
            continue
        if key.section is not None and isinstance(node.value, dict):
            yield from _deprecated(key.section, where, checked)
        elif key.mark(Deprecated) and node.origin.kind != "default":
            yield where, key
