"""Configuration: defaults and checks. A failure here stops with the plugin's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import ConfigFinding
from nxdt_core.kernel.hookspecs.registration import hookspec

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import ConfigDefaultsContext, ValidateConfigContext

__all__ = ["nxdt_config_defaults", "nxdt_validate_config"]


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
