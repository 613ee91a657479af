"""Entry module: says what the engine does. It imports neither torch nor the engine."""

from nxdt_core.api import EngineComponent, hookimpl


@hookimpl
def nxdt_engines() -> list[EngineComponent]:
    """Declare an engine of one process."""
    return [
        EngineComponent(
            name="solo",
            target="acme_engine.engine:SoloEngine",
            summary="one process on one device, in the dtype of the parameters",
        )
    ]
