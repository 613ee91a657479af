"""The typed, strict configuration of a run: schema, loading, checking, showing. No torch here."""

from nxdt_core.config.fields.component import ChecksItself, ReadsHFConfig
from nxdt_core.config.load import check, load
from nxdt_core.config.output.json_schema import json_schema
from nxdt_core.config.output.reference import reference_markdown
from nxdt_core.config.output.show import render_show
from nxdt_core.config.resolved import ResolvedConfig, Selected
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Origin

__all__ = [
    "ChecksItself",
    "Origin",
    "ReadsHFConfig",
    "ResolvedConfig",
    "RunConfig",
    "Selected",
    "check",
    "json_schema",
    "load",
    "reference_markdown",
    "render_show",
]
