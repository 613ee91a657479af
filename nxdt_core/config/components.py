"""Selection of components, loggers and callbacks, by name or by the rules that apply where a file names none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Any

from pydantic import ValidationError
from pydantic.errors import PydanticUserError

from nxdt_core.config.huggingface import architectures_of, fill_recipe, merge_hf_values, read_hf_config
from nxdt_core.config.read import Reading, fill, interpolate, interpolations, read_part
from nxdt_core.config.schema import SLOTS, Composition, RunConfig, Selected, Slot, core_class
from nxdt_core.config.secrets import mask_secrets
from nxdt_core.config.section import Key, Section, composed, keys_of
from nxdt_core.config.tree import DEFAULT, Origin, Place, Tree, join, parts_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    BadComponentConfig,
    ConfigProblem,
    ImpossibleCombination,
    MissingKey,
    UnknownKey,
    WrongValue,
)
from nxdt_core.errors.plugins import AmbiguousComponent
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.registry import reading_model

__all__ = [
    "CALLBACKS",
    "LOGGERS",
    "Replaced",
    "drop_replaced",
    "find_replaced",
    "mask_options",
    "part_of",
    "run_model",
    "select",
    "select_extensions",
    "selected",
    "usable_class",
]


_BY_DEFAULT = "the default"
_RULE_KEYS = ("model.model_config", "checkpoint.uri", "data.tokenizer")
"""Keys that the rules below read in addition to the selectors."""


def select(tree: Tree, kernel: Kernel, label: str, *, published: bool) -> tuple[Composition, list[ConfigProblem]]:
    """Return the component of every slot and what is wrong with the choices.

    Names that follow from rules are added to the tree, the values of ``model.model_config``, and the defaults of a run
    that starts from a published model.

    Args:
        tree: What was written.
        kernel: Knows the components.
        label: Place of problems with keys that are not written anywhere.
        published: Whether the run starts from a published model.
    """
    view = tree
    if any(interpolations(tree.data)):
        view = tree.copy()
        fill(view, RunConfig)
        whole = () if "model.name" in tree else ("model",)  # a model without a name is sought by its whole section
        interpolate(view, wanted=(*(slot.key for slot in SLOTS), *_RULE_KEYS, *whole))
    hf = read_hf_config(view)
    composition, problems = Composition(), list[ConfigProblem]()
    for slot in SLOTS:
        around = slot.section.split(".")
        sections = [tree.get(tuple(around[: depth + 1])) for depth in range(len(around))]
        name = view.get(slot.key)
        name = _default(slot) if name is None else name
        mappings = all(isinstance(each, (dict, type(None))) for each in sections)
        if not mappings or not isinstance(name, (str, type(None))):
            composition.open.add(slot.section)  # reported when it is read
            continue
        key, why = slot.key, ""
        if key not in tree and slot.kind == "store" and "checkpoint.uri" in tree:
            key = "checkpoint.uri"
        origin = tree.origin(key) if key in tree or slot.section in tree else Origin(kind="file", where=label)
        try:
            if slot.kind == "store":
                uri = view.get("checkpoint.uri")
                scheme = uri.partition("://")[0] if isinstance(uri, str) and "://" in uri else "file"
                kernel.registry.check_scheme(scheme)
            if name is None:
                name, why = _implied_name(slot, view, kernel, hf.values)
            component = None
            if name is not None:
                component = kernel.registry.get(slot.kind, name)
            elif slot.kind == "store":
                component = kernel.registry.storage_for_scheme(scheme)
            composition.components[slot.kind] = component
            if component is not None and (cls := component.load_config()) is not None:
                composition.classes[slot.section] = cls
        except NxdtError as error:
            note = f" The name follows from {why}." if why else ""
            problems.append(BadComponentChoice(**origin.at(key), error=error, note=note))
            composition.open.add(slot.section)
        if why:
            tree.set(slot.key, name, replace(DEFAULT, where="" if why == _BY_DEFAULT else f"by {why}"))
            if slot.kind == "model" and not published:
                composition.notes.append(f"{slot.key}: not given; {name!r} follows from {why}")
    faults = merge_hf_values(tree, composition, hf)
    if faults:
        composition.unfilled["model"] = composition.classes["model"]
    if published:
        composition.notes.extend(fill_recipe(tree, hf))
    return composition, [*problems, *faults]


def _implied_name(slot: Slot, view: Tree, kernel: Kernel, hf: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the name that a rule gives where the configuration gives none, and why; None and nothing: no rule does."""
    if slot.kind == "dataset":
        return "hf-data", _BY_DEFAULT
    if slot.kind == "tokenizer":
        named = any(view.get(f"data.tokenizer.{key}") is not None for key in ("type", "model"))
        return ("huggingface", "data.tokenizer.type") if named else (None, "")
    if slot.kind != "model":
        return None, ""
    architectures = architectures_of(hf)
    if not architectures:
        return "llama", _BY_DEFAULT
    readers = kernel.registry.readers(architectures)
    if len(readers) > 1:
        raise AmbiguousComponent(
            kind="model",
            name=architectures[0],
            offers=tuple(component.qualified_name for component in readers),
            dists=tuple(f"{component.dist} {component.version}" for component in readers),
        )
    name = readers[0].record.name if readers else reading_model(architectures[0]) or "hf"
    return name, f"model.model_config ({architectures[0]})"


def run_model(tree: Tree, composition: Composition) -> tuple[type, list[ConfigProblem]]:
    """Return the model of the run: the core's sections with the keys of the selected components.

    A component whose class pydantic cannot use is left out, which is a problem.
    """
    cls = composed(RunConfig, tuple(composition.classes.items()))
    try:
        cls.model_rebuild()
        return cls, []
    except PydanticUserError:
        problems: list[ConfigProblem] = []
        for slot in SLOTS:
            component = composition.components.get(slot.kind)
            try:
                if component is not None:
                    usable_class(component, tree.origin(slot.key).at(slot.key))
            except BadComponentConfig as problem:
                problems.append(problem)
                composition.open.add(slot.section)
                del composition.classes[slot.section]
        return composed(RunConfig, tuple(composition.classes.items())), problems


def selected(composition: Composition, reading: Reading) -> dict[str, Selected | None]:
    """Return the selected components by kind, each with an instance of its own class; None where its keys are wrong."""
    chosen: dict[str, Selected | None] = {}
    for slot in SLOTS:
        component, cls = composition.components.get(slot.kind), composition.classes.get(slot.section)
        names, section = slot.section.split("."), None
        if slot.kind not in composition.components:
            continue
        if component is not None and cls is not None and reading.instance is not None:
            section = part_of(reduce(getattr, names, reading.instance), cls)
        elif component is not None and cls is not None:
            keys = {(*names, name) for name in keys_of(cls)}
            # With a default in place of a wrong value, what the component says of it would mislead.
            if not any(at[:depth] in keys for at in reading.wrong for depth in range(len(at) + 1)):
                data = reduce(lambda around, name: around.get(name) or {}, names, reading.data)
                values = {name: data[name] for name in keys_of(cls) if name in data}
                with suppress(ValidationError):
                    section = cls.model_validate_json(json.dumps(values, default=str), strict=True)  # type: ignore[attr-defined]
        chosen[slot.kind] = None if component is None else Selected(component=component, config=section)
    return chosen


def part_of(section: Any, cls: Any) -> Any:
    """Return an instance of ``cls``, whose keys are some of those of a section that is composed and valid."""
    values = {}
    for key in keys_of(cls).values():
        value = getattr(section, key.attribute)
        whole = key.section is None or value is None or type(value) is key.section
        values[key.name] = value if whole else part_of(value, key.section)
    return cls.model_construct(**values)


def usable_class(component: RegisteredComponent, place: Place) -> type | None:
    """Return the class of the component's section; ``place`` is that of the key that selects it.

    Raises:
        BadComponentChoice: it cannot be imported.
        BadComponentConfig: a field has a type that no YAML value can have.
    """
    try:
        cls = component.load_config()
    except NxdtError as error:
        raise BadComponentChoice(**place, error=error) from error
    if cls is None:
        return None
    try:
        cls.model_rebuild()  # type: ignore[attr-defined]
    except PydanticUserError as error:
        named = re.search(r"<class '(?:.*\.)?(\w+)'>", error.message)
        kind = f": {named[1]}" if named else ""
        reason = f"a key of {cls.__name__} has a type that no YAML value can be read into{kind}"
        name, dist = component.qualified_name, component.dist
        raise BadComponentConfig(**place, component=name, dist=dist, reason=reason) from error
    return cls


_FILE = "file://"
_IMPLIED = {"store": _FILE, "tokenizer": "huggingface"}
"""Kind → what is replaced where the source below names no component."""


Replaced = tuple[Slot, str, str, tuple[str, ...]]
"""A choice of a component over one of a lower source: both names, and the keys that only lower sources give a value."""


def find_replaced(low: Tree, high: Tree) -> list[Replaced]:
    """Return where ``high`` names another component than ``low``, which it is about to be merged over."""
    found = []
    for slot in SLOTS:
        before = _name(low, slot) or _IMPLIED.get(slot.kind) or _default(slot)
        after = _name(high, slot)
        section, above = low.get(slot.section), high.get(slot.section)
        if section is None or before is None or after is None or before == after:
            continue
        given = {key for key, value in above.items() if value is not None} if isinstance(above, dict) else ()
        below = section if isinstance(section, dict) else ()
        keys = tuple(key for key in below if key != slot.selector and key not in given)
        found.append((slot, before, after, keys))
    return found


def drop_replaced(tree: Tree, replaced: Iterable[Replaced], kernel: Kernel) -> list[str]:
    """Take keys out of the tree that only the component that was replaced declares.

    Keys of the core, and those that both components declare, stay.

    Returns:
        A note for each component whose keys were dropped.
    """
    notes = []
    for slot, before, after, keys in replaced:
        old, new = _declared(slot, before, kernel), _declared(slot, after, kernel)
        if old is None or new is None:
            continue
        staying = {**new, **keys_of(core_class(slot.section) or Section)}
        dropped = [key for key in keys if key in old and key not in staying]
        for key in dropped:
            tree.remove(join(slot.section, key))
        if dropped:
            names = ", ".join(dropped)
            notes.append(f"{slot.key}: {after!r} replaces {before!r}, whose keys are left out: {names}")
    return notes


def _name(tree: Tree, slot: Slot) -> str | None:
    """The name that a source gives, or of a store the scheme of its address, with ``://``."""
    name, uri = tree.get(slot.key), tree.get("checkpoint.uri")
    if name is None and slot.kind == "store" and isinstance(uri, str):
        scheme, separator, _ = uri.partition("://")
        return f"{scheme}://" if separator else _FILE
    return name if isinstance(name, str) else None


def _default(slot: Slot) -> str | None:
    """Return the name that the core's section has by default."""
    key = keys_of(core_class(slot.section) or Section).get(slot.selector)
    return key.default if key is not None and isinstance(key.default, str) else None


def _declared(slot: Slot, name: str, kernel: Kernel) -> Mapping[str, Key] | None:
    """Keys of a component; None where they are not known."""
    try:
        component: RegisteredComponent = (
            kernel.registry.storage_for_scheme(name.removesuffix("://"))
            if name.endswith("://")
            else kernel.registry.get(slot.kind, name)
        )
        cls = component.load_config()
        return keys_of(cls) if cls is not None else {}
    except NxdtError:
        return None


LOGGERS, CALLBACKS = "exp_manager.loggers", "trainer.callbacks"
_FLAGS = {
    "tensorboard": "summary_writer_kwargs",
    "wandb": "wandb_logger_kwargs",
    "mlflow": "mlflow_logger_kwargs",
}
"""Logger → key of ``exp_manager`` with its options; ``create_<logger>_logger`` switches it on."""


def mask_options(tree: Tree, kernel: Kernel) -> None:
    """Mask the secrets among the options of loggers and callbacks, selected or not."""
    places = [(f"exp_manager.{options}", logger) for logger, options in _FLAGS.items()]
    for path in (LOGGERS, CALLBACKS):
        places += [(where, tree.get(f"{where}.name")) for where, _ in _entries(tree, path)]
    for where, name in places:
        if isinstance(tree.get(where), dict) and isinstance(name, str):
            with suppress(NxdtError):  # of a component that cannot be had, which :func:`select_extensions` reports
                cls = usable_class(kernel.registry.get("callback", name), tree.origin(where).at(""))
                for key in keys_of(cls).values() if cls is not None else ():
                    mask_secrets(tree, key, (*parts_of(where), key.name))


def _entries(tree: Tree, path: str) -> list[tuple[str, Any]]:
    """Return path and value of each item of a list."""
    items = tree.get(path)
    return [(f"{path}[{number}]", item) for number, item in enumerate(items if isinstance(items, list) else ())]


def select_extensions(
    tree: Tree, kernel: Kernel
) -> tuple[dict[str, tuple[Selected, ...]], list[ConfigProblem], list[str]]:
    """Return the loggers and callbacks with their options, by key of their list; what is wrong with them; and notes.

    An entry is a name, or a mapping of ``name`` and options. The tree is complete and interpolated.
    """
    problems, notes, extensions = list[ConfigProblem](), list[str](), dict[str, tuple[Selected, ...]]()
    for path in (LOGGERS, CALLBACKS):
        entries: list[tuple[str, str, str]] = []  # name, the key that holds it, the path of its options
        for where, item in _entries(tree, path):
            key = f"{where}.name"
            name, place = tree.get(key), tree.origin(key).at(key)
            if isinstance(item, str):
                entries.append((item, where, where))
            elif isinstance(name, str):
                entries.append((name, key, where))
            elif name is not None:  # `yes` is a boolean of YAML
                problems.append(WrongValue(**place, found=tree.describe(key), allowed="the component's name, a text"))
            elif isinstance(item, dict):
                problems.append(MissingKey(**place, allowed="the component's name"))
        names = {name for name, _, _ in entries}
        for logger, options_name in _FLAGS.items() if path == LOGGERS else ():
            key, options = f"exp_manager.create_{logger}_logger", f"exp_manager.{options_name}"
            flag = tree.get(key)
            if key not in tree or not isinstance(flag, (bool, type(None))):  # reported when it is read
                continue
            by_default = logger == "tensorboard" and tree.get(LOGGERS) is None
            if (by_default if flag is None else flag) and logger not in names:
                entries.append((logger, key, options))
            elif flag is False and tree.origin(key).kind != "default" and logger in names:
                reason = f"{key} is false, and {LOGGERS} names {logger!r}"
                place = tree.origin(key).at(key)
                problems.append(ImpossibleCombination(**place, reason=reason, advice="Keep one of the two."))
            elif tree.get(options):
                notes.append(f"{options}: no effect, since {key} does not select that logger")
        components: list[Selected] = []
        for name, key, options in entries:
            place, instance = tree.origin(key).at(key), None
            try:
                component = kernel.registry.get("callback", name)
                cls = usable_class(component, place)
            except NxdtError as error:
                problem = error if isinstance(error, ConfigProblem) else BadComponentChoice(**place, error=error)
                problems.append(problem)
                continue
            part = tree.copy(options)
            if not isinstance(part.data, dict):
                part = Tree({}, {(): tree.origin(key)})
            if key == f"{options}.name":
                part.remove("name")
            if cls is not None:
                instance, faults = read_part(cls, part, options)
                problems += faults
            else:
                problems += [UnknownKey(**part.origin(name).at(f"{options}.{name}")) for name in part.data]
            components.append(Selected(component=component, config=instance))
        extensions[path] = tuple(components)
    return extensions, problems, notes
