"""Entry module: declares the engine that hands models to neuronx-distributed, without importing it or torch."""

from nxdt_core.api import EngineComponent, hookimpl


@hookimpl
def nxdt_engines() -> list[EngineComponent]:
    """Declare what the engine does; every layout here is compared with the torch engine by ``make test-nxd``."""
    return [
        EngineComponent(
            name="nxd",
            target="nxdt_plugin_nxd.engine:NxdEngine",
            config="nxdt_plugin_nxd.config:NxdConfig",
            summary="neuronx-distributed and torch-xla, on Trainium with SDKs up to 2.31",
            capabilities=frozenset(
                {"dp", "tp", "pp", "ep", "adapters", "recompute", "param_groups", "precision", "xla"}
            ),
            rules="nxdt_plugin_nxd.rules:find_impossible_layouts",
        )
    ]
