"""Entry module of ``nxdt-plugin-preference``: declares the components; each is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare the two losses."""
    return [
        Component(
            name="dpo",
            target="nxdt_plugin_preference.objectives:Dpo",
            config="nxdt_plugin_preference.config:DpoConfig",
            requires=frozenset({"reference"}),
            summary="direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)",
        ),
        Component(
            name="orpo",
            target="nxdt_plugin_preference.objectives:Orpo",
            config="nxdt_plugin_preference.config:OrpoConfig",
            summary="odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)",
        ),
    ]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the pairs that both are trained on."""
    return [
        Component(
            name="preference",
            target="nxdt_plugin_preference.loader:PreferenceData",
            config="nxdt_plugin_preference.config:PreferenceConfig",
            summary="prompts with a chosen and a rejected answer",
        )
    ]
