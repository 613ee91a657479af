"""Gives legacy keys their names of today, and leaves out those that say nothing here, as the table says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from nxdt_core.config.schema import SLOTS, RunConfig
from nxdt_core.config.section import Key, keys_of
from nxdt_core.config.tree import join
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.config.document import Document
from nxdt_plugin_migrate.config.renamed_keys import ALIGNMENT, GONE, NEUTRAL, OF_ENGINE, RENAMED, SECTIONS

_CHECKPOINT = "the section checkpoint has all of saving and resuming"
_RING, _METHOD = "model.fusions.ring_attention", "distributed_strategy.context_parallel_method"


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


def rename_keys(document: Document) -> None:
    """Give older spellings, and the parts of ``model_alignment_strategy``, the names that the schema has for them."""
    for path, key in RENAMED.items():
        if path in document.settings and document.value(path) is None:
            document.moved[document.settings[path].source] = key
            document.drop(path, "off", "null says that it is not set")
        else:
            document.move(path, key, _CHECKPOINT if key.startswith("checkpoint.") else "")
    if document.has("model_alignment_strategy.dpo"):
        reason = "model_alignment_strategy.dpo is given too, and a run has one loss"
        document.drop("model_alignment_strategy.orpo", "unsupported", reason)
    for part, (section, name) in SECTIONS.items():
        if not document.has(f"model_alignment_strategy.{part}"):
            continue
        for path in document.below(f"model_alignment_strategy.{part}"):
            document.move(path, ALIGNMENT.get(path, section + path.removeprefix(f"model_alignment_strategy.{part}")))
        if name is not None:
            document.put(f"{section}.name", name, f"model_alignment_strategy.{part} asks for it")
    document.drop("model_alignment_strategy", "unneeded", "it is empty")
    if document.value(_RING):
        document.drop(_RING, "renamed", f"{_METHOD}: ring")
        document.put(_METHOD, "ring", f"{_RING}: true")


def drop_dead_keys(document: Document, kernel: Kernel) -> None:
    """Leave out what says nothing here, and what asks for something that is not done; both with the reason."""
    nxd = document.value("parallel_engine.name") == "nxd"
    for path in list(document.settings):
        if _declared(path, document, kernel):
            continue
        if path in OF_ENGINE and nxd:
            document.move(path, OF_ENGINE[path])
        elif path in OF_ENGINE:
            document.drop(path, "unneeded", f"only the engine nxd reads it, as {OF_ENGINE[path]}")
        elif path in GONE:
            document.drop(path, "unneeded", GONE[path])
        elif path in NEUTRAL:
            (neutral, reason), value = NEUTRAL[path], document.value(path)
            if value is None or any(type(value) is type(each) and value == each for each in neutral):
                document.drop(path, "off", reason or "it asks for nothing, and no selected component reads it")
            elif reason:
                document.drop(path, "unsupported" if document.asks(path) else "off", reason)


def _declared(path: str, document: Document, kernel: Kernel) -> bool:
    """Return whether the core or the selected component reads the key; one that cannot be had reads none."""
    section, _, name = path.rpartition(".")
    slot = next((slot for slot in SLOTS if slot.section == section), None)
    if path in core_keys() or slot is None:
        return path in core_keys()
    default = "huggingface" if slot.key == "data.tokenizer.library" else core_keys()[slot.key].default
    component = document.value(slot.key, default)
    try:
        cls = kernel.registry.get(slot.kind, component).load_config() if isinstance(component, str) else None
    except NxdtError:
        return False
    return cls is not None and name in keys_of(cls)
