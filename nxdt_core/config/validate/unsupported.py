"""Settings that are not implemented, each with its substitute here. Implementing one deletes its rule.

A rule says which values ask for nothing; any other value is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nxdt_core.config.fields.types import describe_value
from nxdt_core.config.secrets.messages import describe_node
from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors.configuration import NotSupported

__all__ = ["RULES", "Unsupported", "find_unsupported"]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A key that is known and has no implementation, with the values that are accepted."""

    key: str
    neutral: tuple[Any, ...]
    """Values that ask for nothing, the first of them in the message; ``null`` and an empty list always do."""
    reason: str


_SAVING = "exp_manager.checkpoint_callback_params"
_WHOLE = "a checkpoint is saved whole, so that a run can resume from it"
_EXPORT = "`nxdt checkpoint export` writes a model alone, and checkpoint.hf_every_n_saves does so with saves"
_NVIDIA = (
    "it is of NVIDIA's resiliency extension; here a rank that dies ends all ranks within seconds, and"
    " checkpoint.resume_if_exists resumes the run"
)
_SLOW = "slow ranks are not looked for; trainer.profiler: pytorch writes a trace of each rank to compare"


RULES: tuple[Unsupported, ...] = (
    Unsupported(
        "distributed_strategy.pipeline_model_parallel_split_rank",
        (None,),
        "it splits encoders from decoders, and models here are decoders",
    ),
    Unsupported(
        "trainer.reload_dataloaders_every_n_epochs", (0,), "data are opened once, and passes follow each other"
    ),
    Unsupported(
        "trainer.accumulate_grad_batches",
        (1,),
        "data.global_batch_size and data.micro_batch_size decide how many micro-batches a step adds up",
    ),
    Unsupported(
        "trainer.enable_model_summary", (False,), "`nxdt plan` shows parameters, memory and FLOPs, also of each rank"
    ),
    Unsupported("trainer.use_distributed_sampler", (False,), "the core hands out samples itself, each of them once"),
    Unsupported("trainer.precision", (32, "32", "32-true"), "precision.type decides"),
    Unsupported(
        "exp_manager.enable_recovery_time_instrumentation",
        (False,),
        "restarts are not timed; what saves cost is in saves.jsonl",
    ),
    Unsupported("exp_manager.create_straggler_detection_callback", (False,), _SLOW),
    Unsupported("exp_manager.straggler_detection_params", (None,), _SLOW),
    Unsupported("exp_manager.create_fault_tolerance_callback", (False,), _NVIDIA),
    Unsupported("exp_manager.fault_tolerance", (None,), _NVIDIA),
    Unsupported(
        f"{_SAVING}.save_on_train_epoch_end", (False,), "every_n_epochs: 1 saves at the end of each pass over the data"
    ),
    Unsupported(f"{_SAVING}.save_nemo_on_train_end", (False,), _EXPORT),
    Unsupported(f"{_SAVING}.always_save_nemo", (False,), _EXPORT),
    Unsupported(f"{_SAVING}.save_weights_only", (False,), f"{_WHOLE}; {_EXPORT}"),
    Unsupported(
        f"{_SAVING}.save_best_model",
        (False,),
        "checkpoint.monitor and save_top_k keep the best checkpoint, which needs no second file",
    ),
    Unsupported(f"{_SAVING}.save_last_n_optim_states", (-1,), f"{_WHOLE}; checkpoint.save_top_k bounds their number"),
    Unsupported("model.save_logits", (False,), "logits are not written; `nxdt generate` runs a model on a text"),
    Unsupported("base", (None,), "a base is read with the file that names it, and overrides come later"),
)


def find_unsupported(checked: Checked) -> Iterator[NotSupported]:
    """Yield the keys with a value that this version would not carry out."""
    for rule in RULES:
        value = checked.values.get(rule.key)
        if value in (None, ()) or any(type(value) is type(allowed) and value == allowed for allowed in rule.neutral):
            continue
        yield NotSupported(
            **checked.place(rule.key),
            found=describe_node(node) if (node := checked.tree.find(rule.key)) else describe_value(value),
            reason=rule.reason,
            allowed=_allowed(rule.neutral[0]),
        )


def _allowed(neutral: Any) -> str:
    return describe_value(neutral).partition(" (")[0]
