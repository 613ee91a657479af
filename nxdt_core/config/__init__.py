"""The typed, strict configuration of a run: schema, loading, checking, showing. No torch here."""

from nxdt_core.config.load import PlainFile, check, load, read_file
from nxdt_core.config.schema import ResolvedConfig, RunConfig, Selected
from nxdt_core.config.show import json_schema, render_show
from nxdt_core.config.tree import Origin

__all__ = [
    "Origin",
    "PlainFile",
    "ResolvedConfig",
    "RunConfig",
    "Selected",
    "check",
    "json_schema",
    "load",
    "read_file",
    "render_show",
]
