"""Entry module of ``nxdt-plugin-distill``: declares the loss, which is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare the loss."""
    return [
        Component(
            name="distill",
            target="nxdt_plugin_distill.objective:Distill",
            config="nxdt_plugin_distill.config:DistillConfig",
            requires=frozenset({"frozen_model"}),
            summary="distillation from a teacher: forward or reverse KL, generalized JSD (Agarwal et al. 2024, "
            "arXiv:2306.13649)",
        )
    ]
