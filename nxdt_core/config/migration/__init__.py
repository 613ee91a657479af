"""``nxdt config migrate``: files of NxD Training, NeMo 1.x and neuronx-nemo-megatron become files of this schema."""

from nxdt_core.config.migration.foreign import FRAMEWORKS
from nxdt_core.config.migration.migrate import Migration, migrate
from nxdt_core.config.migration.report import report_json, report_markdown, summary

__all__ = ["FRAMEWORKS", "Migration", "migrate", "report_json", "report_markdown", "summary"]
