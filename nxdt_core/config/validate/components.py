"""What components and plugins themselves find wrong, once the types are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nxdt_core.config.fields.component import ChecksItself
from nxdt_core.config.fields.component_slots import SLOTS, Composition
from nxdt_core.config.sources.node import Node, join, to_plain
from nxdt_core.config.validate import Checked
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, BadComponentConfig, ComponentFinding, ConfigProblem
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.hookspecs import ValidateConfigContext

__all__ = ["component_findings", "engine_findings", "names_by_slot", "plugin_findings"]

_ENGINE = "engine"


def component_findings(
    checked: Checked, composition: Composition, instances: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield the problems that the dataclasses of components report of themselves."""
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
