"""Loggers and callbacks: lists of components, each a name or a mapping of ``name`` and the component's own keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nxdt_core.config.location import Locator
from nxdt_core.config.node import Node
from nxdt_core.config.reading import read_part
from nxdt_core.config.resolved import Selected
from nxdt_core.config.select import usable_class
from nxdt_core.config.suggest import nearest_keys
from nxdt_core.errors import (
    BadComponentChoice,
    ConfigProblem,
    ImpossibleCombination,
    MissingKey,
    NxdtError,
    UnknownKey,
)
from nxdt_core.kernel import Kernel

__all__ = ["Extensions", "select_extensions"]

_LOGGERS = "exp_manager.loggers"
_FLAGS = {
    "tensorboard": "summary_writer_kwargs",
    "wandb": "wandb_logger_kwargs",
    "mlflow": "mlflow_logger_kwargs",
    "dllogger": "dllogger_logger_kwargs",
    "clearml": "clearml_logger_kwargs",
    "neptune": "neptune_logger_kwargs",
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
    for path, name, options in _wanted_loggers(tree, found):
        _add(found, found.loggers, "logger", path, name, options, kernel, locator)
    for path, name, options in _items(tree, "trainer.callbacks", found):
        _add(found, found.callbacks, "callback", path, name, options, kernel, locator)
    return found


_Wanted = tuple[str, Node, Node]
"""Key path of the options, the node of the name, the options."""


def _items(tree: Node, path: str, found: Extensions) -> Iterator[_Wanted]:
    node = tree.find(path)
    for number, item in enumerate(node.value if node is not None and isinstance(node.value, list) else ()):
        where = f"{path}[{number}]"
        if isinstance(item.value, str):
            yield where, item, Node({}, item.origin)
        elif isinstance(item.value, dict) and isinstance(item.plain("name"), str):
            yield where, item.value["name"], item.without("name")
        elif isinstance(item.value, dict):
            found.problems.append(MissingKey(**item.origin.at(f"{where}.name"), allowed="the component's name"))


def _wanted_loggers(tree: Node, found: Extensions) -> Iterator[_Wanted]:
    listed = list(_items(tree, _LOGGERS, found))
    yield from listed
    names = {name.value for _, name, _ in listed}
    given = tree.plain(_LOGGERS) is not None
    for logger, options_name in _FLAGS.items():
        key, path = f"exp_manager.create_{logger}_logger", f"exp_manager.{options_name}"
        flag, options = tree.find(key), tree.find(path)
        if flag is None or type(flag.value) is not bool:
            continue
        written = flag.origin.kind != "default"
        if flag.value and logger not in names and (written or not given):
            usable = options if options is not None and isinstance(options.value, dict) else Node({}, flag.origin)
            yield path, Node(logger, flag.origin), usable
        elif not flag.value and written and logger in names:
            reason = f"{key} is false, and {_LOGGERS} names {logger!r}"
            problem = ImpossibleCombination(**flag.origin.at(key), reason=reason, advice="Keep one of the two.")
            found.problems.append(problem)
        elif options is not None and options.value:
            found.notes.append(f"{path}: no effect, since {key} does not select that logger")


def _add(
    found: Extensions,
    chosen: list[Selected],
    kind: str,
    path: str,
    name: Node,
    options: Node,
    kernel: Kernel,
    locator: Locator,
) -> None:
    try:
        component = kernel.registry.get(kind, name.value)
        cls = usable_class(component)
    except ConfigProblem as problem:
        found.problems.append(problem)
        return
    except NxdtError as error:
        found.problems.append(BadComponentChoice(**name.origin.at(path), error=error))
        return
    if cls is None:
        for key, child in options.children.items():
            candidates = nearest_keys(f"{path}.{key}", [f"{path}.name"])
            found.problems.append(
                UnknownKey(**child.origin.at(f"{path}.{key}"), candidates=candidates, known=("name",))
            )
        chosen.append(Selected(component=component, config=None))
        return
    instance, problems = read_part(cls, options, path, locator)
    found.problems += problems
    chosen.append(Selected(component=component, config=instance))
