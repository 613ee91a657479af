"""Configurations of other programs: which installed migration takes one, and the report of what became of each key."""

from nxdt_core.config.migration.programs import environment_notes, explained, migrate
from nxdt_core.config.migration.report import report_json, report_markdown, summary

__all__ = [
    "environment_notes",
    "explained",
    "migrate",
    "report_json",
    "report_markdown",
    "summary",
]
