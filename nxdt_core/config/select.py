"""Which components a configuration selects, by name or by the rules that apply where it names none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxdt_core.api import ModelComponent
from nxdt_core.config.keys import BadAnnotation, keys_of
from nxdt_core.config.node import Node, Origin, join
from nxdt_core.config.slots import SLOTS, Composition, Slot
from nxdt_core.errors import AmbiguousComponent, BadComponentChoice, BadComponentConfig, ConfigProblem, NxdtError
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.contexts import ResolveModelContext, ResolveStorageContext

__all__ = ["Selection", "select", "usable_class"]


@dataclass(slots=True)
class Selection:
    """The components by slot, and the tree in which each is named."""

    tree: Node
    components: dict[str, RegisteredComponent | None] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    problems: list[ConfigProblem] = field(default_factory=list)

    @property
    def composition(self) -> Composition:
        """What completing and reading need to know."""
        return Composition(components=self.components, classes=self.classes, open=frozenset(self.open))


def select(given: Node, view: Node, kernel: Kernel, hf: Mapping[str, Any], origin: Origin) -> Selection:
    """Select the component of every slot.

    Args:
        given: What was written; names that follow from rules are added to it.
        view: The same with the core's defaults and with interpolations resolved; selectors are read from it.
        kernel: Knows the components.
        hf: The Hugging Face configuration that ``model.model_config`` names, or nothing.
        origin: Of problems with keys that nobody wrote.
    """
    selection = Selection(tree=given)
    for slot in SLOTS:
        name = view.plain(slot.key)
        node = given.find(slot.key)
        if not isinstance(name, (str, type(None))):  # told by reading, as a wrong type
            selection.open.add(slot.section)
            continue
        try:
            component, why = _choose(slot, name, view, kernel, hf)
        except NxdtError as error:
            written = node or _section(given, slot) or Node(None, origin)
            problem = BadComponentChoice(**written.origin.at(slot.key), error=error)
            selection.problems.append(problem)
            selection.open.add(slot.section)
            component, why = None, Origin(kind="default", where="")
        if why is not None:
            selection.tree = _named(selection.tree, slot, component, name, why)
        if slot.section not in selection.open:
            selection.components[slot.name] = component
            _take_class(selection, slot, component, node.origin if node else origin)
    return selection


def _section(given: Node, slot: Slot) -> Node | None:
    section = given.find(slot.section)
    return section if section is not None and section.origin.kind != "default" else None


def _named(tree: Node, slot: Slot, component: RegisteredComponent | None, name: str | None, why: Origin) -> Node:
    """The tree with the name that a rule gave; a name that could not be had stays as the rule said it."""
    chosen = component.record.name if component is not None else name
    if chosen is None and slot.name not in ("model", "data"):
        return tree
    return tree.set(slot.key, Node(chosen or why.where or "?", why))


def _choose(
    slot: Slot, name: str | None, view: Node, kernel: Kernel, hf: Mapping[str, Any]
) -> tuple[RegisteredComponent | None, Origin | None]:
    """The component, and where its name comes from if not from the configuration."""
    if name is not None:
        return kernel.registry.get(slot.kind, name), None
    if slot.name == "model":
        return _model(view, kernel, hf)
    if slot.name == "data":
        rule = _data_name(view)
        return kernel.registry.get(slot.kind, rule), Origin(kind="default", where="by model_source")
    if slot.name == "tokenizer":
        return _tokenizer(view, kernel)
    if slot.name == "checkpoint_storage":
        return _storage(view, kernel), None
    return None, None


def _model(view: Node, kernel: Kernel, hf: Mapping[str, Any]) -> tuple[RegisteredComponent, Origin]:
    registry = kernel.registry
    architectures = tuple(str(name) for name in hf.get("architectures") or ())
    section = view.plain("model", {})
    context = ResolveModelContext(model=section if isinstance(section, dict) else {}, hf_architectures=architectures)
    answer = kernel.hooks.nxdt_resolve_model(context)
    if answer is not None:
        return registry.get("model_builder", answer.value), Origin(kind="plugin", where=answer.plugin)
    readers = [
        component
        for component in registry.all("model_builder")
        if isinstance(component.record, ModelComponent) and set(component.record.hf_architectures) & set(architectures)
    ]
    if readers:
        return _only(readers, architectures[0]), Origin(kind="default", where="by model.model_config")
    if "mixtral" in str(view.plain("name", "")).lower():
        name = "mixtral"
    else:
        name = "gpt" if view.plain("model_source") == "megatron" else "llama"
    return registry.get("model_builder", name), Origin(kind="default", where="by name and model_source")


def _only(readers: list[RegisteredComponent], architecture: str) -> RegisteredComponent:
    if len(readers) > 1:
        raise AmbiguousComponent(
            kind="model_builder",
            name=architecture,
            offers=tuple(component.qualified_name for component in readers),
            dists=tuple(f"{component.dist} {component.version}" for component in readers),
        )
    return readers[0]


def _data_name(view: Node) -> str:
    if view.plain("model_alignment_strategy") is not None:
        return "sft-chat"
    return "megatron-data" if view.plain("model_source") == "megatron" else "hf-data"


def _tokenizer(view: Node, kernel: Kernel) -> tuple[RegisteredComponent | None, Origin | None]:
    section = view.find("data.tokenizer")
    given = section.children if section is not None else {}
    if not any(key in given and given[key].value is not None for key in ("type", "model")):
        return None, None
    component = kernel.registry.get("tokenizer", "huggingface")
    return component, Origin(kind="default", where="by data.tokenizer.type")


def _storage(view: Node, kernel: Kernel) -> RegisteredComponent:
    uri = view.plain("checkpoint.uri")
    uri = uri if isinstance(uri, str) else ""
    answer = kernel.hooks.nxdt_resolve_checkpoint_storage(ResolveStorageContext(uri=uri)) if uri else None
    if answer is not None:
        return kernel.registry.get("checkpoint_storage", answer.value)
    scheme, separator, _ = uri.partition("://")
    return kernel.registry.storage_for_scheme(scheme if separator else "file")


def _take_class(selection: Selection, slot: Slot, component: RegisteredComponent | None, origin: Origin) -> None:
    """Import the dataclass of the component's section and see that its annotations can be read."""
    if component is None:
        return
    try:
        cls = usable_class(component)
    except NxdtError as error:
        found = error if isinstance(error, ConfigProblem) else BadComponentChoice(**origin.at(slot.key), error=error)
        selection.problems.append(found)
        selection.open.add(slot.section)
        return
    if cls is not None:
        selection.classes[slot.section] = cls


def usable_class(component: RegisteredComponent) -> type | None:
    """The component's dataclass.

    Raises:
        ComponentUnusable: it cannot be imported.
        BadComponentConfig: a field has a type that no YAML value can have.
    """
    cls = component.load_config()
    if cls is None:
        return None
    try:
        _visit(cls)
    except BadAnnotation as error:
        raise BadComponentConfig(
            place=component.dist,
            key=join(component.kind, component.record.name),
            component=component.qualified_name,
            dist=component.dist,
            reason=str(error),
        ) from error
    return cls


def _visit(cls: type) -> None:
    for key in keys_of(cls).values():
        if key.section is not None and key.section is not cls:
            _visit(key.section)
