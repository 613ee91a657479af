"""What a configuration says of plugins, its loggers and callbacks, and what plugins find wrong in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxdt_core.config.checks import Checked
from nxdt_core.config.components import usable_class
from nxdt_core.config.interpolation import interpolate
from nxdt_core.config.read import read_part
from nxdt_core.config.resolved import Selected
from nxdt_core.config.schema import SLOTS, Composition, PluginsConfig
from nxdt_core.config.secrets import describe_node
from nxdt_core.config.section import ChecksItself
from nxdt_core.config.tree import KeyPath, Node, Origin, find_node, join, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    BadComponentConfig,
    ComponentFinding,
    ConfigProblem,
    ImpossibleCombination,
    MissingKey,
    UnknownKey,
    WrongValue,
)
from nxdt_core.errors.plugins import ComponentUnusable, LocalPluginMissing
from nxdt_core.kernel import Kernel, PluginPolicy, RegisteredComponent
from nxdt_core.kernel.hookspecs import ValidateConfigContext
from nxdt_core.kernel.plugin import LOCAL

__all__ = [
    "FLAGS",
    "Extensions",
    "component_findings",
    "engine_findings",
    "names_by_slot",
    "option_sections",
    "plugin_findings",
    "read_policy",
    "select_extensions",
    "start_kernel",
    "unusable_files",
]


def read_policy(tree: Node) -> PluginPolicy | list[ConfigProblem]:
    """Return the policy, or what is wrong with the section: no plugin is imported under a policy that was not
    understood."""
    resolved, problems = interpolate(tree, wanted=("plugins",))
    section = resolved.find("plugins")
    if section is None or section.value is None:
        return problems or PluginPolicy()
    read, wrong = read_part(PluginsConfig, section, "plugins")
    if problems or wrong:
        return [*problems, *wrong]
    return PluginPolicy(
        allow=read.allow,
        block=read.block,
        schemes=read.schemes,
        prefer=read.prefer,
        local=read.local,
        lock=read.lock,
    )


def start_kernel(policy: PluginPolicy, tree: Node) -> Kernel | ConfigProblem:
    """Return the kernel under ``policy``, or the reason why it does not start, at the key that is at fault."""
    try:
        return Kernel.start(policy)
    except NxdtError as error:
        key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
        return BadComponentChoice(**_origin(tree, key).at(key), error=error)


def unusable_files(kernel: Kernel, tree: Node) -> Iterator[ConfigProblem]:
    """Yield the files of ``plugins.local`` that do not load: they were asked for by name, unlike what is merely
    installed."""
    key = "plugins.local"
    for plugin in kernel.plugins:
        if plugin.dist == LOCAL and plugin.state not in ("ok", "blocked"):
            yield ComponentFinding(
                **_origin(tree, key).at(key),
                message=f"the plugin file {plugin.location} is {plugin.state}: {plugin.reason}.",
                advice="Name one of the two."
                if plugin.state == "shadowed"
                else "Correct it, or take it out of plugins.local.",
            )


def _origin(tree: Node, key: str) -> Origin:
    """Where ``key`` was written, else the section ``plugins``."""
    node = tree.find(key) or tree.find("plugins")
    return node.origin if node is not None else Origin(kind="default", where="")


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


def select_extensions(tree: Node, kernel: Kernel) -> Extensions:
    """Select loggers and callbacks of the completed, interpolated tree."""
    found = Extensions()
    for wanted in _wanted_loggers(tree, found):
        found.loggers += _selected(wanted, found, kernel)
    for wanted in _items(tree, "trainer.callbacks", found):
        found.callbacks += _selected(wanted, found, kernel)
    return found


def option_sections(tree: Node, kernel: Kernel) -> Iterator[tuple[KeyPath, type]]:
    """Yield where options of loggers and callbacks are written, selected or not, and the section that declares them;
    a component that cannot be had is left out: :func:`select_extensions` reports it."""
    places: list[tuple[KeyPath, object]] = [(("exp_manager", options), logger) for logger, options in FLAGS.items()]
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


def _selected(wanted: _Wanted, found: Extensions, kernel: Kernel) -> Iterator[Selected]:
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
    instance, problems = read_part(cls, wanted.options, wanted.path)
    found.problems += problems
    yield Selected(component=component, config=instance)


_ENGINE = "engine"


def component_findings(
    checked: Checked, composition: Composition, instances: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield the problems that the sections of components report of themselves."""
    for slot in SLOTS:
        instance, component = instances.get(slot.section), composition.components.get(slot.kind)
        if component is not None and isinstance(instance, ChecksItself):
            yield from _checked(instance, component, slot.section, checked)


def engine_findings(checked: Checked, composition: Composition) -> Iterator[ConfigProblem]:
    """Yield the problems that the rules of the selected engine report of the layout."""
    component = composition.components.get(_ENGINE)
    if component is None:
        return
    key = f"{_ENGINE}.name"
    try:
        rules = component.load_rules()
        found = [] if rules is None else list(rules(checked))
    except ComponentUnusable as error:
        yield BadComponentChoice(**checked.place(key), error=error)
    except Exception as error:  # a plugin's code: any exception is reported with the plugin's name
        yield BadComponentConfig(
            **checked.place(key),
            component=component.qualified_name,
            dist=component.dist,
            reason=f"its rules raised {type(error).__name__}: {error}",
        )
    else:
        yield from found


def _checked(
    instance: ChecksItself, component: RegisteredComponent, section: str, checked: Checked
) -> Iterator[ConfigProblem]:
    try:
        for key, message in instance.check():
            yield ComponentFinding(**checked.place(join(section, key)), message=_sentence(message))
    except Exception as error:  # a plugin's code: any exception is reported with the plugin's name
        yield BadComponentConfig(
            **checked.place(section),
            component=component.qualified_name,
            dist=component.dist,
            reason=f"its check raised {type(error).__name__}: {error}",
        )


def plugin_findings(tree: Node, composition: Composition, kernel: Kernel, checked: Checked) -> Iterator[ConfigProblem]:
    """Yield the problems that the hook ``nxdt_validate_config`` reports."""
    context = ValidateConfigContext(config=to_plain(tree), components=names_by_slot(composition))
    try:
        for result in kernel.hooks.nxdt_validate_config(context=context):
            for finding in result.value:
                message = _sentence(f"{finding.message} (plugin {result.plugin!r})")
                yield ComponentFinding(**checked.place(finding.key), message=message, advice=finding.remedy)
    except NxdtError as error:
        yield BadComponentChoice(**checked.place("plugins"), error=error)


def names_by_slot(composition: Composition) -> dict[str, str]:
    """Return ``plugin:name`` by slot, as hooks receive it."""
    return {slot: found.qualified_name for slot, found in composition.components.items() if found is not None}


def _sentence(message: str) -> str:
    return message if message.endswith((".", "!", "?")) else f"{message}."
