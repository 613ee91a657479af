"""Corrects the files of a run whose first rank was ended before it could. Needs no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from nxdt_core.config import ResolvedConfig
from nxdt_core.regular_files import read_text, replace_text
from nxdt_core.training.monitoring.log_lines import strict_json
from nxdt_core.training.run.metric_rows import json_object

__all__ = ["mark_failed"]

_CODE = re.compile(r"\[(NXDT-[A-Z0-9]+)\]")
_LIVING = ("starting", "running")


def mark_failed(config: ResolvedConfig, text: str) -> None:
    """Mark the run as failed in those of its files that still describe it as running.

    The first rank may have ended with a different exception because another rank had died. The code in the text then
    replaces the name of that exception.

    Args:
        config: of the run. With ``use_datetime_version``, files below its directory are not found and stay unchanged.
        text: what the launcher prints about the failure; the code in it becomes the error.
    """
    settings, code = config.run.exp_manager.monitoring, _CODE.search(text)
    with suppress(OSError, ValueError, RecursionError):
        if settings.health_file is not None:
            path = config.run_dir / Path(settings.health_file).expanduser()
            health = json_object(read_text(path))
            state, error = health.get("state"), str(health.get("error"))
            has_consequence = state == "failed" and not error.startswith("NXDT-")
            if state in _LIVING or (code and has_consequence):
                replace_text(path, strict_json({**health, "state": "failed", "error": code and code[1]}) + "\n")
    with suppress(OSError, ValueError):
        if settings.metrics_file is not None:
            path = config.run_dir / Path(settings.metrics_file).expanduser()
            metrics = read_text(path)
            if any(re.search(rf'^nxdt_state{{.*state="{state}"}} 1$', metrics, re.MULTILINE) for state in _LIVING):
                none = re.sub(r"^(nxdt_state{.*}) 1$", r"\1 0", metrics, flags=re.MULTILINE)
                replace_text(path, re.sub(r'^(nxdt_state{.*state="failed"}) 0$', r"\1 1", none, flags=re.MULTILINE))
