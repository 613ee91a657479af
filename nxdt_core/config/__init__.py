"""The typed, strict configuration of a run: schema, loading, checking, showing. No torch here."""

from nxdt_core.config.component import ChecksItself, ReadsHFConfig
from nxdt_core.config.load import check, load
from nxdt_core.config.node import Origin
from nxdt_core.config.resolved import ResolvedConfig, Selected
from nxdt_core.config.schema.run import RunConfig

__all__ = [
    "ChecksItself",
    "Origin",
    "ReadsHFConfig",
    "ResolvedConfig",
    "RunConfig",
    "Selected",
    "check",
    "load",
]
