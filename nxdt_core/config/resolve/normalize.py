"""What was written, brought into one form before anything is filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nxdt_core.config.fields.component_slots import SLOTS
from nxdt_core.config.fields.keys import section_paths
from nxdt_core.config.resolve.interpolation import has_interpolation, interpolate
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Node, Origin, from_plain, merge, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, BadComponentConfig, ConfigProblem, MissingKey
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.hookspecs import ConfigDefaultsContext

__all__ = [
    "MOVED",
    "find_ungiven",
    "mandatory_keys",
    "merge_plugin_defaults",
    "tidy_given",
    "with_moved_keys",
    "with_name",
]

_MANDATORY = "???"
"""OmegaConf's mark for "must be given": by an override, a plugin or ``config.json``, but not by a default."""


MOVED = {
    "exp_manager.resume_if_exists": "checkpoint.resume_if_exists",
    "exp_manager.resume_ignore_no_checkpoint": "checkpoint.resume_ignore_no_checkpoint",
    "exp_manager.resume_from_checkpoint": "checkpoint.resume_from",
    "exp_manager.create_checkpoint_callback": "checkpoint.enabled",
    "model.weight_init_only": "checkpoint.weight_init_only",
}
"""Keys under which files of nxdt 0.1 say what the section ``checkpoint`` says now; they go in 0.3."""


def with_moved_keys(given: Node) -> tuple[Node, list[str]]:
    """Return the tree with keys that moved in their new places, and a note for each.

    An override of the old key replaces a file's new one. Where both are written in one place, the old one is unknown.
    """
    notes = []
    for old, new in MOVED.items():
        node, there = given.find(old), given.find(new)
        if node is not None and (there is None or (there.origin.kind == "file" and node.origin.kind != "file")):
            given = given.without(old).set(new, node)
            notes.append(f"{old}: this key is {new} now; the old name goes in nxdt-core 0.3")
    return given, notes


def tidy_given(given: Node) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree without ``???``, with whole sections that are interpolations replaced, and with ``section: name``
    spelled out as ``section: {name: …}``."""
    given = _without_mandatory(given)
    taken = [path for path in section_paths(RunConfig) if _is_interpolation(given.find(path))]
    given, problems = interpolate(given, wanted=taken) if taken else (given, [])
    for slot in SLOTS:
        node = given.find(slot.section)
        if node is not None and isinstance(node.value, str):
            given = given.set(slot.section, Node({slot.selector: node}, node.origin))
    return given, problems


def with_name(given: Node, stem: str) -> Node:
    """Return the tree with ``stem``, the name of its file, as the run's name where none is given."""
    if not stem or given.find("name") is not None:
        return given
    return given.set("name", Node(stem, Origin(kind="default", where="of the file's name")))


def mandatory_keys(given: Node) -> dict[str, Origin]:
    """Return the keys that say ``???``, and where."""
    return {path: node.origin for path, node in given.leaf_nodes() if node.value == _MANDATORY}


def find_ungiven(mandatory: Mapping[str, Origin], tree: Node) -> Iterator[ConfigProblem]:
    """Yield an error for each key of ``mandatory`` that has no value but a default's."""
    for path, origin in mandatory.items():
        found = tree.find(path)
        if found is not None and found.origin.kind == "default":
            yield MissingKey(**origin.at(path), allowed=f"a value in place of {_MANDATORY}")


def _is_interpolation(node: Node | None) -> bool:
    return node is not None and has_interpolation(node.value)


def _without_mandatory(node: Node) -> Node:
    if not isinstance(node.value, dict):
        return node
    kept = {key: _without_mandatory(child) for key, child in node.value.items() if child.value != _MANDATORY}
    return Node(kept, node.origin)


def merge_plugin_defaults(given: Node, label: str, kernel: Kernel) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with what the hook ``nxdt_config_defaults`` gives below it; of several plugins the first wins."""
    try:
        context = ConfigDefaultsContext(config=to_plain(given), source=label)
        results = kernel.hooks.nxdt_config_defaults(context=context)
    except NxdtError as error:
        return given, [BadComponentChoice(**Origin(kind="plugin", where="").at(""), error=error)]
    problems: list[ConfigProblem] = []
    for result in results:
        origin = Origin(kind="plugin", where=result.plugin)
        if isinstance(result.value, Mapping):
            given = merge(from_plain(result.value, origin), given)
        else:
            reason = f"nxdt_config_defaults gave a {type(result.value).__name__}, not a mapping"
            fault = BadComponentConfig(**origin.at(""), component=result.plugin, dist=result.dist, reason=reason)
            problems.append(fault)
    return given, problems
