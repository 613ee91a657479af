"""Section ``exp_manager.monitoring``: the state of a run for other programs. The docstrings are the YAML reference."""

from __future__ import annotations

from typing import Annotated

from nxdt_core.config.annotations import NonNegativeFloat, Range
from nxdt_core.config.section import Section

__all__ = ["MonitoringConfig"]


class MonitoringConfig(Section):
    """The state of a run for other programs: files and a port of rank 0. Nothing is written by default."""

    health_file: str | None = None
    """JSON file with the state of the run, such as ``health.json``. Relative paths start at the run's directory."""
    metrics_file: str | None = None
    """File of metrics in Prometheus' text format, for the textfile collector of node_exporter. Its name ends with
    ``.prom``. Relative paths start at the run's directory."""
    port: Annotated[int, Range(0, 65535)] | None = None
    """Port that serves the metrics at ``/metrics`` and the state at ``/health``; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address of that port; ``0.0.0.0`` lets other machines read the metrics, without a password."""
    interval_s: NonNegativeFloat = 10.0
    """Seconds between two updates while the run is in one state. Another state is written at once."""
