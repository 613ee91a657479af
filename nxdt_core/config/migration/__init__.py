"""``nxdt config migrate``: files of NxD Training, NeMo 1.x and neuronx-nemo-megatron become files of this schema."""

from nxdt_core.config.frameworks import FRAMEWORKS
from nxdt_core.config.migration.migrate import Migration, migrate
from nxdt_core.config.migration.report import report_json, report_markdown, summary
from nxdt_core.config.migration.table import KeyStatus, schema_page, schema_table, value_table

__all__ = [
    "FRAMEWORKS",
    "KeyStatus",
    "Migration",
    "migrate",
    "report_json",
    "report_markdown",
    "schema_page",
    "schema_table",
    "summary",
    "value_table",
]
