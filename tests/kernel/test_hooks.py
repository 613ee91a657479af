"""Calling hooks: order, whose result it is, and what a failure does."""

from __future__ import annotations

import pytest
from nxdt_testing.errors import raises

from nxdt_core.api import ConfigFinding
from nxdt_core.errors.plugins import BadComponentRecord, PluginHookFailed
from nxdt_core.kernel.hookspecs import (
    ConfigDefaultsContext,
    ValidateConfigContext,
)

DEFAULTS = ConfigDefaultsContext(config={}, source="run.yaml")
VALIDATE = ValidateConfigContext(config={"trainer": {"max_steps": 7}}, components={}, kernel=None)


@pytest.fixture
def kernel_of(site):
    """Start a kernel on plugins given as ``name=source``; each appends to the list ``seen`` of the module's."""

    def start(**sources):
        for name, source in sources.items():
            site.add(
                f"nxdt-plugin-{name}", f"from nxdt_core.api import *\nfrom nxdt_core.api import hookimpl\n{source}"
            )
        return site.start(strict=True)

    return start


def recorder(name: str, options: str = "") -> str:
    return f"@hookimpl{options}\ndef nxdt_validate_config(context): context.components.append({name!r})"


def test_implementations_are_called_in_order_of_distribution_within_first_and_last(kernel_of):
    kernel = kernel_of(
        d=recorder("d", "(tryfirst=True)"),
        c=recorder("c"),
        a=recorder("a", "(trylast=True)"),
        b=recorder("b"),
    )
    seen: list[str] = []
    context = ValidateConfigContext(config={}, components=seen, kernel=kernel)
    assert list(kernel.call("nxdt_validate_config", context=context)) == []
    assert seen == ["d", "b", "c", "a"]


def test_results_carry_their_plugin_and_nothing_counts_as_no_result(kernel_of):
    kernel = kernel_of(
        a="@hookimpl\ndef nxdt_config_defaults(): return {'a': 1}",
        b="@hookimpl\ndef nxdt_config_defaults(context): return None",
        c="@hookimpl\ndef nxdt_config_defaults(context): return {'from': context.source}",
    )
    results = kernel.call("nxdt_config_defaults", context=DEFAULTS)
    assert [(plugin.name, plugin.dist, value) for plugin, value in results] == [
        ("a", "nxdt-plugin-a", {"a": 1}),
        ("c", "nxdt-plugin-c", {"from": "run.yaml"}),
    ]


def test_findings_of_all_plugins_are_gathered(kernel_of):
    kernel = kernel_of(
        a="@hookimpl\ndef nxdt_validate_config(context):\n"
        "    return [ConfigFinding(key='trainer.max_steps', message=str(context.config['trainer']['max_steps']))]",
        b="@hookimpl\ndef nxdt_validate_config(): return []",
    )
    (_, first), (_, second) = kernel.call("nxdt_validate_config", context=VALIDATE)
    assert first == [ConfigFinding(key="trainer.max_steps", message="7")]
    assert second == []


def test_a_function_may_implement_a_hook_of_another_name(kernel_of):
    kernel = kernel_of(a="@hookimpl(specname='nxdt_config_defaults')\ndef defaults_of_a(): return {'a': 1}")
    ((_, value),) = kernel.call("nxdt_config_defaults", context=DEFAULTS)
    assert value == {"a": 1}


@pytest.mark.parametrize(
    ("hook", "context"),
    [
        ("nxdt_config_defaults", DEFAULTS),
        ("nxdt_validate_config", VALIDATE),
    ],
)
def test_a_failure_where_the_result_matters_stops_and_names_plugin_and_hook(kernel_of, hook, context):
    kernel = kernel_of(a=f"@hookimpl\ndef {hook}(context): raise ValueError('not today')")
    with pytest.raises(PluginHookFailed) as caught:
        list(kernel.call(hook, context=context))
    assert f"The plugin 'a' (nxdt-plugin-a) failed: {hook} raised ValueError: not today" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_user_error_that_a_hook_raises_passes_as_it_is(kernel_of):
    kernel = kernel_of(a="@hookimpl\ndef nxdt_validate_config(context): Component(name='a b', target='m:f')")
    with raises(BadComponentRecord):
        list(kernel.call("nxdt_validate_config", context=VALIDATE))


def test_ctrl_c_in_a_hook_stops(kernel_of):
    kernel = kernel_of(a="@hookimpl\ndef nxdt_validate_config(context): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        list(kernel.call("nxdt_validate_config", context=VALIDATE))


def test_contexts_are_frozen():
    with pytest.raises(AttributeError):
        VALIDATE.config = {}
