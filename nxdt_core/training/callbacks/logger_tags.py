"""Names of metrics for TensorBoard, W&B and MLflow, which group by what is before the slash.

``metrics.jsonl``, ``validation.jsonl`` and callbacks that monitor a metric keep the plain names.
"""

from __future__ import annotations

__all__ = ["tag"]

_PERFORMANCE = frozenset(
    {"tokens_per_s", "mfu", "mfu_palm", "data_wait_s", "step_time_s", "max_memory_bytes", "compile_time_s"}
)
_RENAMED = {"checkpoint_blocked_s": "checkpoint/stall_s"}
_GROUPS = {"val_": "val/", "checkpoint_": "checkpoint/", "run_": "run/", "start_": "start/"}


def tag(name: str) -> str:
    """Return the tag of a metric: ``train/loss``, ``val/loss``, ``perf/tokens_per_s``, ``checkpoint/stall_s``."""
    if name in _RENAMED:
        return _RENAMED[name]
    if name in _PERFORMANCE:
        return f"perf/{name}"
    for prefix, group in _GROUPS.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return f"train/{name}"
