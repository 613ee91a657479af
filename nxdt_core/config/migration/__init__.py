"""Configurations of other programs: which installed migration takes one, and the report of what became of each key."""

from nxdt_core.config.migration.programs import converted, environment_notes, explained, migrate, summary
from nxdt_core.config.migration.report import report_json, report_markdown

__all__ = [
    "converted",
    "environment_notes",
    "explained",
    "migrate",
    "report_json",
    "report_markdown",
    "summary",
]
