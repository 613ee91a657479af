"""Settings of the schema that this version does not carry out yet. Whoever builds one deletes its rule.

A rule says which values ask for nothing; any other value is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nxdt_core.config.node import to_plain
from nxdt_core.config.shapes import describe_value
from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors import NotSupported

__all__ = ["RULES", "Unsupported", "find_unsupported"]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One key."""

    key: str
    neutral: tuple[Any, ...]
    """Values that ask for nothing, the first of them in the message; ``null`` and an empty list always do."""
    reason: str


_NOT_YET = "this version does not do that"
_STEPS = "this version counts in steps"
_LOOP = "the training loop is the core's own"


def _group(section: str, reason: str, **neutral: Any) -> tuple[Unsupported, ...]:
    return tuple(Unsupported(f"{section}.{key}", (value,), reason) for key, value in neutral.items())


RULES: tuple[Unsupported, ...] = (
    *_group("distributed_strategy", _NOT_YET, token_shuffle_group_size=1, pipeline_model_parallel_split_rank=None),
    *_group(
        "trainer",
        _STEPS,
        max_epochs=-1,
        min_steps=None,
        min_epochs=None,
        check_val_every_n_epoch=None,
        reload_dataloaders_every_n_epochs=0,
    ),
    *_group(
        "trainer",
        _LOOP,
        accumulate_grad_batches=1,
        limit_train_batches=1.0,
        limit_predict_batches=None,
        enable_model_summary=False,
        profiler=None,
        detect_anomaly=False,
        use_distributed_sampler=False,
    ),
    Unsupported("trainer.fast_dev_run", (False, 0), _LOOP),
    Unsupported("trainer.overfit_batches", (0, 0.0), _LOOP),
    Unsupported("trainer.precision", (32, "32", "32-true"), "precision.type decides"),
    *_group(
        "exp_manager",
        _NOT_YET,
        use_datetime_version=False,
        enable_recovery_time_instrumentation=False,
        files_to_copy=None,
        create_early_stopping_callback=False,
        early_stopping_callback_params=None,
        create_straggler_detection_callback=False,
        straggler_detection_params=None,
        create_fault_tolerance_callback=False,
        fault_tolerance=None,
    ),
    *_group(
        "exp_manager.checkpoint_callback_params",
        _NOT_YET,
        every_n_epochs=0,
        save_on_train_epoch_end=False,
        save_nemo_on_train_end=False,
        always_save_nemo=False,
        save_weights_only=False,
        save_best_model=False,
        save_last_n_optim_states=-1,
    ),
    *_group("model", _NOT_YET, save_logits=False),
    Unsupported("base", (None,), "a base is read with the file that names it, and overrides come later"),
)


def find_unsupported(checked: Checked) -> Iterator[NotSupported]:
    """Keys with a value that this version would not carry out."""
    for rule in RULES:
        value = checked.values.get(rule.key)
        if value in (None, ()) or any(type(value) is type(allowed) and value == allowed for allowed in rule.neutral):
            continue
        yield NotSupported(
            **checked.place(rule.key),
            found=describe_value(to_plain(node) if (node := checked.tree.find(rule.key)) else value),
            reason=rule.reason,
            allowed=_allowed(rule.neutral[0]),
        )


def _allowed(neutral: Any) -> str:
    return describe_value(neutral).partition(" (")[0]
