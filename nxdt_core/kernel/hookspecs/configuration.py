"""Configuration: defaults, checks, and the moment when it is final. A failure here stops with the plugin's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import ConfigFinding
from nxdt_core.kernel.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import ConfigDefaultsContext, ConfigureContext, ValidateConfigContext

__all__ = ["nxdt_config_defaults", "nxdt_configure", "nxdt_validate_config"]


@hookspec
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Give values to keys that the user left out, as a nested tree. What the user wrote always wins.

    Example::

        @hookimpl
        def nxdt_config_defaults(context):
            return {"exp_manager": {"log_every_n_steps": 5}}
    """


@hookspec
def nxdt_validate_config(context: ValidateConfigContext) -> Iterable[ConfigFinding]:  # type: ignore[empty-body]
    """Report what cannot work. All findings, of the core and of all plugins, are shown together.

    Example::

        @hookimpl
        def nxdt_validate_config(context):
            steps = context.config["trainer"]["max_steps"]
            if steps % 10:
                return [ConfigFinding(key="trainer.max_steps", message=f"{steps} is not a multiple of 10")]
            return []
    """


@hookspec
def nxdt_configure(context: ConfigureContext) -> None:
    """Called on every process when the configuration is valid and final, before anything is built.

    The run's directory exists, and no other run writes to it.

    Example::

        @hookimpl
        def nxdt_configure(context):
            (context.run_dir / "owner.txt").write_text(getpass.getuser())
    """
