"""Detection of the program that a file is for, by keys that no other has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_plugin_migrate.config.document import entries
from nxdt_plugin_migrate.errors import MigrationRefused

FRAMEWORKS = {"nxdt": "NxD Training", "nemo": "NeMo 1.x", "nnm": "neuronx-nemo-megatron"}
"""Value of ``--from`` → name."""

_SHOWN_BY: Mapping[str, Sequence[str]] = {
    "nxdt": (
        *("distributed_strategy", "model_source", "model_alignment_strategy", "aync_exec_max_inflight_requests"),
        *("data.global_batch_size", "model.model_config"),
    ),
    "nnm": (
        *("model.wrap_with_zero", "model.zero_use_master_weight", "model.zero_use_fp32_grad_accum"),
        *("model.flexible_pipeline_parallel_stages", "enable_checkpoint_removal_protection"),
    ),
    "nemo": (
        *("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.micro_batch_size"),
        *("model.global_batch_size", "model.data", "model.tokenizer", "model.mcore_gpt"),
    ),
}
"""Framework → keys, any one of which shows it where none of the frameworks above it is shown."""


_FOREIGN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torchtune", ("*_component_",)),
    ("NeMo 2 or another program that Hydra instantiates", ("*_target_",)),
    ("LLaMA-Factory", ("model_name_or_path", "finetuning_type")),
    ("LLaMA-Factory", ("model_name_or_path", "stage")),
    ("axolotl", ("base_model", "datasets")),
    ("axolotl", ("base_model", "sequence_len")),
    ("Hugging Face's TrainingArguments", ("per_device_train_batch_size",)),
    ("Hugging Face's TrainingArguments", ("output_dir", "num_train_epochs")),
    ("Accelerate", ("compute_environment",)),
    ("DeepSpeed", ("train_micro_batch_size_per_gpu",)),
    ("DeepSpeed", ("zero_optimization",)),
    ("LLM Foundry", ("max_duration", "train_loader")),
    ("torchtitan", ("training", "parallelism")),
    ("LitGPT", ("train.micro_batch_size", "checkpoint_dir")),
    ("LitGPT", ("train.micro_batch_size", "model_name")),
    ("Megatron-LM", ("tensor-model-parallel-size",)),
)
"""Framework → keys that show it together; ``*`` is in front of a name that shows it anywhere."""
_BY_HAND = "Take the nearest of 'nxdt recipes list' and carry the settings over by hand."


def framework_of(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the framework among :data:`FRAMEWORKS` that a file is of, and the key that shows it; empty for others."""
    written = {path for path, _ in entries(values)}
    return next(((name, key) for name, keys in _SHOWN_BY.items() for key in keys if key in written), ("", ""))


def refuse_others(values: Mapping[str, Any], framework: str, source: Path) -> None:
    """See that a file is of none of the frameworks that cannot be migrated.

    Raises:
        MigrationRefused: it shows that it is of one.
    """
    written = {path for path, _ in entries(values)}
    names = {name for path in written for name in path.split(".")}
    for name, keys in _FOREIGN:
        if all(key[1:] in names if key[0] == "*" else key in written for key in keys):
            shown = " and ".join(key.removeprefix("*") for key in keys)
            raise _refused(source, framework, f"{shown} is of {name}", _BY_HAND)


def require(values: Mapping[str, Any], framework: str, source: Path) -> None:
    """See that a file is of the framework that it is said to be of.

    Raises:
        MigrationRefused: it shows that it is of another of those that can be migrated, or nothing shows what it is of.
    """
    shown, key = framework_of(values)
    if shown == framework or (shown, framework) == ("nemo", "nnm"):
        return
    if shown:
        advice = f"Say --from {shown} if that is what it is."
        raise _refused(source, framework, f"{key} is of {FRAMEWORKS[shown]}", advice)
    raise _refused(source, framework, f"it has none of the sections of {FRAMEWORKS[framework]}", _BY_HAND)


def _refused(source: Path, framework: str, reason: str, advice: str) -> NxdtError:
    return MigrationRefused(source=str(source), wanted=FRAMEWORKS[framework], reason=reason, advice=advice)
