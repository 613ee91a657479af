"""What a configuration says of plugins, its loggers and callbacks, and what plugins find wrong in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nxdt_core.config.checks import Checked
from nxdt_core.config.components import usable_class
from nxdt_core.config.interpolation import interpolate
from nxdt_core.config.read import read_part
from nxdt_core.config.schema import SLOTS, PluginsConfig, Selected
from nxdt_core.config.secrets import describe_node
from nxdt_core.config.section import ChecksItself
from nxdt_core.config.tree import KeyPath, Node, Origin, Place, find_node, join, to_plain
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
    "Extensions",
    "component_findings",
    "engine_findings",
    "option_sections",
    "plugin_findings",
    "read_policy",
    "start_problem",
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
    return [*problems, *wrong] or PluginPolicy(**read.model_dump(exclude={"on_resume"}))


def start_problem(tree: Node, error: NxdtError) -> ConfigProblem:
    """Return the reason why no kernel starts, at the key that is at fault."""
    key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
    return BadComponentChoice(**_place(tree, key), error=error)


def unusable_files(kernel: Kernel, tree: Node) -> Iterator[ConfigProblem]:
    """Yield the files of ``plugins.local`` that do not load: they were asked for by name, unlike what is merely
    installed."""
    for plugin in kernel.plugins:
        if plugin.dist == LOCAL and plugin.state not in ("ok", "blocked"):
            message = f"the plugin file {plugin.location} is {plugin.state}: {plugin.reason}."
            correct = "Correct it, or take it out of plugins.local."
            advice = "Name one of the two." if plugin.state == "shadowed" else correct
            yield ComponentFinding(**_place(tree, "plugins.local"), message=message, advice=advice)


def _place(tree: Node, key: str) -> Place:
    """Where ``key`` was written, else the section ``plugins``."""
    node = tree.find(key) or tree.find("plugins")
    return (node.origin if node is not None else Origin(kind="default", where="")).at(key)


_LOGGERS, _CALLBACKS = "exp_manager.loggers", "trainer.callbacks"
_FLAGS = {
    "tensorboard": "summary_writer_kwargs",
    "wandb": "wandb_logger_kwargs",
    "mlflow": "mlflow_logger_kwargs",
}
"""Logger → key of ``exp_manager`` with its options; ``create_<logger>_logger`` switches it on."""


def option_sections(tree: Node, kernel: Kernel) -> Iterator[tuple[KeyPath, type]]:
    """Yield where options of loggers and callbacks are written, selected or not, and the section that declares them;
    a component that cannot be had is left out: :class:`Extensions` reports it."""
    places: list[tuple[KeyPath, object]] = [(("exp_manager", options), logger) for logger, options in _FLAGS.items()]
    for key in (_LOGGERS, _CALLBACKS):
        places += [((*key.split("."), number), item.plain("name")) for number, item in enumerate(_list(tree, key))]
    for path, name in places:
        section = find_node(tree, path)
        if section is None or not section.children or not isinstance(name, str):
            continue
        with suppress(NxdtError):
            cls = usable_class(kernel.registry.get("callback", name), section.origin.at(""))
            if cls is not None:
                yield path, cls


def _list(tree: Node, key: str) -> Sequence[Node]:
    node = tree.find(key)
    return node.value if node is not None and isinstance(node.value, list) else ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One entry of a list, or one logger that a flag switches on."""

    key: str
    """Where the name is written."""
    name: Node
    path: str
    """Where the options are written."""
    options: Node


class Extensions:
    """What the lists of loggers and callbacks select: each entry is a name, or a mapping of ``name`` and options."""

    def __init__(self, tree: Node, kernel: Kernel) -> None:
        """Select from the completed, interpolated tree."""
        self.problems: list[ConfigProblem] = []
        self.notes: list[str] = []
        self.loggers = self._selected(self._loggers(tree), kernel)
        self.callbacks = self._selected(self._listed(tree, _CALLBACKS), kernel)

    def _listed(self, tree: Node, path: str) -> Iterator[_Wanted]:
        for number, item in enumerate(_list(tree, path)):
            where = f"{path}[{number}]"
            name = item.children.get("name")
            if isinstance(item.value, str):
                yield _Wanted(where, item, where, Node({}, item.origin))
            elif name is not None and isinstance(name.value, str):
                yield _Wanted(f"{where}.name", name, where, item.without("name"))
            elif name is not None and name.value is not None:  # `yes` is a boolean of YAML
                place, allowed = name.origin.at(f"{where}.name"), "the component's name, a text"
                self.problems.append(WrongValue(**place, found=describe_node(name), allowed=allowed))
            elif isinstance(item.value, dict):
                self.problems.append(MissingKey(**item.origin.at(f"{where}.name"), allowed="the component's name"))

    def _loggers(self, tree: Node) -> Iterator[_Wanted]:
        listed = list(self._listed(tree, _LOGGERS))
        yield from listed
        names = {wanted.name.value for wanted in listed}
        for logger, options_name in _FLAGS.items():
            key, path = f"exp_manager.create_{logger}_logger", f"exp_manager.{options_name}"
            flag, options = tree.find(key), tree.find(path)
            if flag is None or not isinstance(flag.value, (bool, type(None))):  # reported when it is read
                continue
            by_default = logger == "tensorboard" and tree.plain(_LOGGERS) is None
            if (by_default if flag.value is None else flag.value) and logger not in names:
                usable = options if options is not None and isinstance(options.value, dict) else Node({}, flag.origin)
                yield _Wanted(key, Node(logger, flag.origin), path, usable)
            elif flag.value is False and flag.origin.kind != "default" and logger in names:
                reason, advice = f"{key} is false, and {_LOGGERS} names {logger!r}", "Keep one of the two."
                self.problems.append(ImpossibleCombination(**flag.origin.at(key), reason=reason, advice=advice))
            elif options is not None and options.value:
                self.notes.append(f"{path}: no effect, since {key} does not select that logger")

    def _selected(self, entries: Iterable[_Wanted], kernel: Kernel) -> tuple[Selected, ...]:
        """Return the components with their options, without those that cannot be had."""
        found = []
        for wanted in entries:
            place, instance = wanted.name.origin.at(wanted.key), None
            try:
                component = kernel.registry.get("callback", wanted.name.value)
                cls = usable_class(component, place)
            except NxdtError as error:
                problem = error if isinstance(error, ConfigProblem) else BadComponentChoice(**place, error=error)
                self.problems.append(problem)
                continue
            if cls is not None:
                instance, problems = read_part(cls, wanted.options, wanted.path)
                self.problems += problems
            else:
                for key, child in wanted.options.children.items():
                    self.problems.append(UnknownKey(**child.origin.at(f"{wanted.path}.{key}")))
            found.append(Selected(component=component, config=instance))
        return tuple(found)


def component_findings(checked: Checked, components: Mapping[str, Selected | None]) -> list[ConfigProblem]:
    """Return the problems that the sections of components report of themselves."""
    problems: list[ConfigProblem] = []
    for slot in SLOTS:
        selected = components.get(slot.kind)
        if selected is not None and isinstance(selected.config, ChecksItself):
            with _guarded(selected.component, checked.place(slot.section), "check", problems):
                for key, message in selected.config.check():
                    place = checked.place(join(slot.section, key))
                    problems.append(ComponentFinding(**place, message=_sentence(message)))
    return problems


def engine_findings(checked: Checked, components: Mapping[str, Selected | None]) -> list[ConfigProblem]:
    """Return the problems that the rules of the selected engine report of the layout."""
    problems: list[ConfigProblem] = []
    engine = components.get("engine")
    if engine is not None:
        with _guarded(engine.component, checked.place("parallel_engine.name"), "rules", problems):
            rules = engine.component.load_rules()
            problems.extend(() if rules is None else rules(checked))
    return problems


@contextmanager
def _guarded(component: RegisteredComponent, place: Place, what: str, problems: list[ConfigProblem]) -> Iterator[None]:
    """Add any exception of a plugin's code in the block to ``problems``, with the plugin's name."""
    try:
        yield
    except ComponentUnusable as error:
        problems.append(BadComponentChoice(**place, error=error))
    except Exception as error:
        reason = f"its {what} raised {type(error).__name__}: {error}"
        name, dist = component.qualified_name, component.dist
        problems.append(BadComponentConfig(**place, component=name, dist=dist, reason=reason))


def plugin_findings(
    checked: Checked, components: Mapping[str, Selected | None], kernel: Kernel
) -> Iterator[ConfigProblem]:
    """Yield the problems that the hook ``nxdt_validate_config`` reports."""
    names = {kind: found.component.qualified_name for kind, found in components.items() if found is not None}
    context = ValidateConfigContext(config=to_plain(checked.tree), components=names, kernel=kernel)
    try:
        for plugin, findings in kernel.call("nxdt_validate_config", context=context):
            for finding in findings:
                message = _sentence(f"{finding.message} (plugin {plugin.name!r})")
                yield ComponentFinding(**checked.place(finding.key), message=message, advice=finding.remedy)
    except NxdtError as error:
        yield BadComponentChoice(**checked.place("plugins"), error=error)


def _sentence(message: str) -> str:
    return message if message.endswith((".", "!", "?")) else f"{message}."
