"""Entry module of ``nxdt-plugin-preference``: declares the components; each is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import DataloaderComponent, ObjectiveComponent, hookimpl


@hookimpl
def nxdt_objectives() -> list[ObjectiveComponent]:
    """Declare the two losses."""
    return [
        ObjectiveComponent(
            name="dpo",
            target="nxdt_plugin_preference.dpo:Dpo",
            config="nxdt_plugin_preference.config:DpoConfig",
            requires=frozenset({"reference"}),
            summary="direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)",
        ),
        ObjectiveComponent(
            name="orpo",
            target="nxdt_plugin_preference.orpo:Orpo",
            config="nxdt_plugin_preference.config:OrpoConfig",
            summary="odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)",
        ),
    ]


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare the pairs that both are trained on."""
    return [
        DataloaderComponent(
            name="preference",
            target="nxdt_plugin_preference.loader:PreferenceDataloader",
            config="nxdt_plugin_preference.config:PreferenceConfig",
            summary="prompts with a chosen and a rejected answer",
        )
    ]
