"""Entry module of ``nxdt-plugin-evaluate``: declares what judges a model; libraries are imported when they are used."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_metrics() -> list[Component]:
    """Return the figures of ``nxdt evaluate`` on held-out records."""
    return [
        Component(
            name="rouge",
            target="nxdt_plugin_evaluate.rouge:Rouge",
            summary="ROUGE-1, ROUGE-2 and ROUGE-L by Google's library, with words of any script",
        )
    ]


@hookimpl
def nxdt_tasks() -> list[Component]:
    """Tasks of ``nxdt evaluate --task``."""
    return [
        Component(
            name="lm-eval",
            target="nxdt_plugin_evaluate.suite:Harness",
            summary="tasks of EleutherAI's lm-evaluation-harness; needs nxdt-plugin-evaluate[lm-eval]",
        )
    ]
