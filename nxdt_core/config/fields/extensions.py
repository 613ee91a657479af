"""Loggers and callbacks: lists of components, each a name or a mapping of ``name`` and the component's own keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nxdt_core.config.resolve.bind import read_part
from nxdt_core.config.resolve.path_values import Locator
from nxdt_core.config.resolve.select import usable_class
from nxdt_core.config.resolved import Selected
from nxdt_core.config.secrets.fields import Path, find_node
from nxdt_core.config.secrets.messages import describe_node
from nxdt_core.config.sources.node import Node
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    ConfigProblem,
    ImpossibleCombination,
    MissingKey,
    UnknownKey,
    WrongValue,
)
from nxdt_core.kernel import Kernel

__all__ = ["FLAGS", "Extensions", "option_sections", "select_extensions"]

_LOGGERS = "exp_manager.loggers"
FLAGS = {
    "tensorboard": "summary_writer_kwargs",
    "wandb": "wandb_logger_kwargs",
    "mlflow": "mlflow_logger_kwargs",
}
"""Logger → key of ``exp_manager`` with its options; ``create_<logger>_logger`` switches it on."""


@dataclass(slots=True)
class Extensions:
    """What the two lists select."""

    loggers: list[Selected] = field(default_factory=list)
    callbacks: list[Selected] = field(default_factory=list)
    problems: list[ConfigProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select_extensions(tree: Node, kernel: Kernel, locator: Locator) -> Extensions:
    """Select loggers and callbacks of the completed, interpolated tree."""
    found = Extensions()
    for wanted in _wanted_loggers(tree, found):
        found.loggers += _selected(wanted, found, kernel, locator)
    for wanted in _items(tree, "trainer.callbacks", found):
        found.callbacks += _selected(wanted, found, kernel, locator)
    return found


def option_sections(tree: Node, kernel: Kernel) -> Iterator[tuple[Path, type]]:
    """Yield where options of loggers and callbacks are written, selected or not, and the section that declares them;
    a component that cannot be had is left out: :func:`select_extensions` reports it."""
    places: list[tuple[Path, object]] = [(("exp_manager", options), logger) for logger, options in FLAGS.items()]
    for key in (_LOGGERS, "trainer.callbacks"):
        node = tree.find(key)
        for number, item in enumerate(node.value if node is not None and isinstance(node.value, list) else ()):
            places.append(((*key.split("."), number), item.plain("name")))
    for path, name in places:
        section = find_node(tree, path)
        if section is None or not section.children or not isinstance(name, str):
            continue
        try:
            cls = usable_class(kernel.registry.get("callback", name), section.origin.at(""))
        except NxdtError:
            continue
        if cls is not None:
            yield path, cls


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One entry of a list, or one logger that a flag switches on."""

    key: str
    """Where the name is written."""
    name: Node
    path: str
    """Where the options are written."""
    options: Node


def _items(tree: Node, path: str, found: Extensions) -> Iterator[_Wanted]:
    node = tree.find(path)
    for number, item in enumerate(node.value if node is not None and isinstance(node.value, list) else ()):
        where = f"{path}[{number}]"
        if isinstance(item.value, str):
            yield _Wanted(where, item, where, Node({}, item.origin))
        elif isinstance(item.value, dict) and isinstance(item.plain("name"), str):
            yield _Wanted(f"{where}.name", item.value["name"], where, item.without("name"))
        elif isinstance(item.value, dict) and item.plain("name") is not None:  # `yes` is a boolean of YAML
            name = item.value["name"]
            place = name.origin.at(f"{where}.name")
            found.problems.append(
                WrongValue(**place, found=describe_node(name), allowed="the component's name, a text")
            )
        elif isinstance(item.value, dict):
            found.problems.append(MissingKey(**item.origin.at(f"{where}.name"), allowed="the component's name"))


def _wanted_loggers(tree: Node, found: Extensions) -> Iterator[_Wanted]:
    listed = list(_items(tree, _LOGGERS, found))
    yield from listed
    names = {wanted.name.value for wanted in listed}
    by_default = {"tensorboard"} if tree.plain(_LOGGERS) is None else set()
    for logger, options_name in FLAGS.items():
        key, path = f"exp_manager.create_{logger}_logger", f"exp_manager.{options_name}"
        flag, options = tree.find(key), tree.find(path)
        if flag is None or not isinstance(flag.value, (bool, type(None))):  # reported when it is read
            continue
        wanted = logger in by_default if flag.value is None else flag.value
        if wanted and logger not in names:
            usable = options if options is not None and isinstance(options.value, dict) else Node({}, flag.origin)
            yield _Wanted(key, Node(logger, flag.origin), path, usable)
        elif flag.value is False and flag.origin.kind != "default" and logger in names:
            reason = f"{key} is false, and {_LOGGERS} names {logger!r}"
            problem = ImpossibleCombination(**flag.origin.at(key), reason=reason, advice="Keep one of the two.")
            found.problems.append(problem)
        elif options is not None and options.value:
            found.notes.append(f"{path}: no effect, since {key} does not select that logger")


def _selected(wanted: _Wanted, found: Extensions, kernel: Kernel, locator: Locator) -> Iterator[Selected]:
    """The component with its options; nothing where it cannot be had."""
    place = wanted.name.origin.at(wanted.key)
    try:
        component = kernel.registry.get("callback", wanted.name.value)
        cls = usable_class(component, place)
    except NxdtError as error:
        found.problems.append(error if isinstance(error, ConfigProblem) else BadComponentChoice(**place, error=error))
        return
    if cls is None:
        for key, child in wanted.options.children.items():
            found.problems.append(UnknownKey(**child.origin.at(f"{wanted.path}.{key}")))
        yield Selected(component=component, config=None)
        return
    instance, problems = read_part(cls, wanted.options, wanted.path, locator)
    found.problems += problems
    yield Selected(component=component, config=instance)
