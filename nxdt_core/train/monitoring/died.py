"""Corrects the files of a run whose first rank was ended before it could. Needs no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from nxdt_core.checkpoint.ownership import is_owned
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.checkpoints import StorageError, StoreInUse
from nxdt_core.regular_files import read_text, replace_text
from nxdt_core.train.monitoring.log_lines import strict_json
from nxdt_core.train.run.files import directory_lock
from nxdt_core.train.run.metric_files import json_object

__all__ = ["mark_failed"]

_CODE = re.compile(r"\[(NXDT-[A-Z0-9]+)\]")
_LIVING = ("starting", "running")


def mark_failed(config: ResolvedConfig, text: str, *, interrupted: bool = False) -> None:
    """Mark the run as failed or interrupted in those of its files that still describe it as running.

    Files of a run directory that a living process owns stay unchanged: they are those of another run, which this one
    could not replace.

    The first rank may have ended with a different exception because another rank had died. The code in the text then
    replaces the name of that exception.

    Args:
        config: of the run. With ``use_datetime_version``, files below its directory are not found and stay unchanged.
        text: what the launcher prints about the failure; the code in it becomes the error.
        interrupted: whether a signal stopped it at once.
    """
    settings, code = config.run.exp_manager.monitoring, _CODE.search(text)
    state = "interrupted" if interrupted else "failed"
    files = {key: getattr(settings, key) for key in ("health_file", "metrics_file")}
    paths = {key: config.run_dir / Path(name).expanduser() for key, name in files.items() if name is not None}
    if not paths or (code and code[1] == StoreInUse.code):
        return
    with suppress(OSError, StorageError):
        if is_owned(directory_lock(config.run_dir)):
            return
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["health_file"]
        health = json_object(read_text(path))
        has_consequence = health["state"] == "failed" and not str(health.get("error")).startswith("NXDT-")
        if health["state"] in _LIVING or (code and has_consequence):
            replace_text(path, strict_json({**health, "state": state, "error": code and code[1]}) + "\n")
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["metrics_file"]
        metrics = read_text(path)
        if any(re.search(rf'^nxdt_state{{.*state="{living}"}} 1$', metrics, re.MULTILINE) for living in _LIVING):
            none = re.sub(r"^(nxdt_state{.*}) 1$", r"\1 0", metrics, flags=re.MULTILINE)
            replace_text(path, re.sub(rf'^(nxdt_state{{.*state="{state}"}}) 0$', r"\1 1", none, flags=re.MULTILINE))
