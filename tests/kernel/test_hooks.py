"""Calling hooks: order, whose result it is, and what a failure does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nxdt_core.api import ConfigFinding
from nxdt_core.errors.plugins import BadComponentRecord, PluginHookFailed
from nxdt_core.kernel.contexts import (
    CheckpointContext,
    ConfigDefaultsContext,
    ConfigureContext,
    FitContext,
    ResolveModelContext,
    ResolveStorageContext,
    StepContext,
    ValidateConfigContext,
)

STEP = StepContext(step=3, consumed_samples=24, consumed_tokens=3072, metrics={"loss": 2.5})
FIT = FitContext(run_dir=Path("runs/a"), rank=0, world_size=1, step=0, max_steps=40)
SAVED = CheckpointContext(step=3, uri="runs/a/step-3", size_bytes=10, consumed_samples=24)
RESOLVE = ResolveModelContext(model={"hidden_size": 64})
DEFAULTS = ConfigDefaultsContext(config={}, source="run.yaml")
VALIDATE = ValidateConfigContext(config={"trainer": {"max_steps": 7}}, components={})


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
    return f"@hookimpl{options}\ndef nxdt_step_end(context): context.metrics.append({name!r})"


def test_implementations_are_called_in_order_of_distribution_within_first_and_last(kernel_of):
    kernel = kernel_of(
        d=recorder("d", "(tryfirst=True)"),
        c=recorder("c"),
        a=recorder("a", "(trylast=True)"),
        b=recorder("b"),
    )
    seen: list[str] = []
    kernel.hooks.nxdt_step_end(StepContext(step=1, consumed_samples=0, consumed_tokens=0, metrics=seen))
    assert seen == ["d", "b", "c", "a"]
    assert [each.plugin for each in kernel.hooks.implementations("nxdt_step_end")] == seen


def test_results_carry_their_plugin_and_nothing_counts_as_no_result(kernel_of):
    kernel = kernel_of(
        a="@hookimpl\ndef nxdt_config_defaults(): return {'a': 1}",
        b="@hookimpl\ndef nxdt_config_defaults(context): return None",
        c="@hookimpl\ndef nxdt_config_defaults(context): return {'from': context.source}",
    )
    results = kernel.hooks.nxdt_config_defaults(DEFAULTS)
    assert [(r.plugin, r.dist, r.value) for r in results] == [
        ("a", "nxdt-plugin-a", {"a": 1}),
        ("c", "nxdt-plugin-c", {"from": "run.yaml"}),
    ]


def test_findings_of_all_plugins_are_gathered(kernel_of):
    kernel = kernel_of(
        a="@hookimpl\ndef nxdt_validate_config(context):\n"
        "    return [ConfigFinding(key='trainer.max_steps', message=str(context.config['trainer']['max_steps']))]",
        b="@hookimpl\ndef nxdt_validate_config(): return []",
    )
    first, second = kernel.hooks.nxdt_validate_config(VALIDATE)
    assert first.value == [ConfigFinding(key="trainer.max_steps", message="7")]
    assert second.value == []


def test_a_function_may_implement_a_hook_of_another_name(kernel_of):
    kernel = kernel_of(a="@hookimpl(specname='nxdt_config_defaults')\ndef defaults_of_a(): return {'a': 1}")
    assert kernel.hooks.nxdt_config_defaults(DEFAULTS)[0].value == {"a": 1}


def test_the_first_answer_counts_and_the_rest_are_not_asked(kernel_of):
    kernel = kernel_of(
        a="@hookimpl\ndef nxdt_resolve_model(context): return None",
        b="@hookimpl\ndef nxdt_resolve_model(context): return f'width-{context.model[\"hidden_size\"]}'",
        c="@hookimpl\ndef nxdt_resolve_model(context): raise AssertionError",
    )
    result = kernel.hooks.nxdt_resolve_model(RESOLVE)
    assert (result.plugin, result.value) == ("b", "width-64")
    assert kernel.hooks.nxdt_resolve_checkpoint_storage(ResolveStorageContext(uri="s3://b")) is None


@pytest.mark.parametrize("failure", ["1 / 0", "raise SystemExit(1)", "import not_installed_anywhere"])
def test_an_observer_that_fails_is_logged_once_by_name_and_the_others_are_called(kernel_of, caplog, failure):
    kernel = kernel_of(
        a=f"@hookimpl\ndef nxdt_step_end(context):\n    {failure}",
        b=recorder("b"),
    )
    seen: list[str] = []
    context = StepContext(step=1, consumed_samples=0, consumed_tokens=0, metrics=seen)
    with caplog.at_level(logging.WARNING, "nxdt.plugins"):
        for _ in range(3):
            kernel.hooks.nxdt_step_end(context)
    assert seen == ["b", "b", "b"]
    (record,) = caplog.records
    assert "plugin 'a' (nxdt-plugin-a): nxdt_step_end" in record.getMessage()


@pytest.mark.parametrize(
    ("hook", "context"),
    [
        ("nxdt_fit_start", FIT),
        ("nxdt_step_end", STEP),
        ("nxdt_fit_end", FIT),
        ("nxdt_checkpoint_saved", SAVED),
        ("nxdt_checkpoint_loaded", SAVED),
    ],
)
def test_each_observer_hook_survives_a_failure(kernel_of, caplog, hook, context):
    kernel = kernel_of(a=f"@hookimpl\ndef {hook}(context): raise ValueError(type(context).__name__)")
    getattr(kernel.hooks, hook)(context)
    assert type(context).__name__ in caplog.text


@pytest.mark.parametrize(
    ("hook", "context"),
    [
        ("nxdt_config_defaults", DEFAULTS),
        ("nxdt_validate_config", VALIDATE),
        ("nxdt_configure", ConfigureContext(config={}, components={}, run_dir=Path("runs"))),
        ("nxdt_resolve_model", RESOLVE),
        ("nxdt_resolve_checkpoint_storage", ResolveStorageContext(uri="s3://b")),
    ],
)
def test_a_failure_where_the_result_matters_stops_and_names_plugin_and_hook(kernel_of, hook, context):
    kernel = kernel_of(a=f"@hookimpl\ndef {hook}(context): raise ValueError('not today')")
    with pytest.raises(PluginHookFailed) as caught:
        getattr(kernel.hooks, hook)(context)
    assert f"The plugin 'a' (nxdt-plugin-a) failed: {hook} raised ValueError: not today" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_user_error_that_a_hook_raises_passes_as_it_is(kernel_of):
    kernel = kernel_of(a="@hookimpl\ndef nxdt_configure(context): Component(name='a b', target='m:f')")
    with pytest.raises(BadComponentRecord):
        kernel.hooks.nxdt_configure(ConfigureContext(config={}, components={}, run_dir=Path("runs")))


def test_ctrl_c_in_an_observer_stops(kernel_of):
    kernel = kernel_of(a="@hookimpl\ndef nxdt_step_end(context): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        kernel.hooks.nxdt_step_end(STEP)


def test_contexts_are_frozen():
    with pytest.raises(AttributeError):
        STEP.step = 4
