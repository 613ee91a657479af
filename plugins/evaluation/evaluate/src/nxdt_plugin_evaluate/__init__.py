"""Entry module of ``nxdt-plugin-evaluate``: declares what judges a model; libraries are imported when they are used."""

from __future__ import annotations

from nxdt_core.api import MetricComponent, TaskSuiteComponent, hookimpl


@hookimpl
def nxdt_metrics() -> list[MetricComponent]:
    """Return the figures of ``nxdt evaluate`` on held-out records."""
    return [
        MetricComponent(
            name="rouge",
            target="nxdt_plugin_evaluate.rouge:Rouge",
            summary="ROUGE-1, ROUGE-2 and ROUGE-L by Google's library, with words of any script",
        )
    ]


@hookimpl
def nxdt_task_suites() -> list[TaskSuiteComponent]:
    """Tasks of ``nxdt evaluate --task``."""
    return [
        TaskSuiteComponent(
            name="lm-eval",
            target="nxdt_plugin_evaluate.suite:Harness",
            summary="tasks of EleutherAI's lm-evaluation-harness; needs nxdt-plugin-evaluate[lm-eval]",
        )
    ]
