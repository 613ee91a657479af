"""Rules about how long a run lasts, how often it validates, and what it writes on the way."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors.configuration import ImpossibleCombination

__all__ = ["ENDING_RULES"]

_STOPPING = "exp_manager.create_early_stopping_callback"
_LOCAL, _GLOBAL = "exp_manager.log_local_rank_0_only", "exp_manager.log_global_rank_0_only"
_BY_STEPS, _BY_PASSES = "trainer.val_check_interval", "trainer.check_val_every_n_epoch"
_SAVE_BY_STEPS = "checkpoint.every_n_train_steps"
_SAVE_BY_PASSES = "checkpoint.every_n_epochs"


def early_stopping_validates(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a problem where early stopping is on and nothing is validated."""
    never = all(checked.values.get(key, "") is None for key in (_BY_STEPS, _BY_PASSES))
    if checked.values.get(_STOPPING) and never:
        yield ImpossibleCombination(
            **checked.place(_STOPPING, _BY_STEPS),
            reason="early stopping judges after each validation, and the run has none",
            advice=f"Set {_BY_STEPS}.",
        )


def one_interval(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a problem where an interval is given both in steps and in passes."""
    for steps, passes in ((_BY_STEPS, _BY_PASSES), (_SAVE_BY_STEPS, _SAVE_BY_PASSES)):
        if checked.values.get(passes) and checked.values.get(steps):
            yield ImpossibleCombination(
                **checked.place(passes, steps),
                reason=f"it counts passes over the data, and {steps} counts steps",
                advice="Set one of them to null.",
            )


def some_training(checked: Checked) -> Iterator[ImpossibleCombination]:
    """No pass, or no batch."""
    for key, advice in (
        ("trainer.max_epochs", "-1 leaves the end to trainer.max_steps."),
        ("trainer.limit_train_batches", "null takes all."),
    ):
        if checked.values.get(key) == 0:
            yield ImpossibleCombination(**checked.place(key), reason="0 trains nothing", advice=advice)


def one_kind_of_log(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield one rank of each node, or one of all."""
    if checked.values.get(_LOCAL) and checked.values.get(_GLOBAL):
        yield ImpossibleCombination(
            **checked.place(_LOCAL, _GLOBAL),
            reason=f"it wants a log of each node, and {_GLOBAL} one of the run",
            advice="Keep one of them.",
        )


ENDING_RULES = (early_stopping_validates, one_interval, some_training, one_kind_of_log)
