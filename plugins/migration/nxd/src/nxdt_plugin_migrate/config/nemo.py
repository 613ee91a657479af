"""What a file of NeMo 1.x or neuronx-nemo-megatron means, in NxD Training's keys, which came from NeMo's."""

from __future__ import annotations

from typing import Any

from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.config.document import Draft
from nxdt_plugin_migrate.config.nxdt import take_nxdt_keys
from nxdt_plugin_migrate.config.peft import take_peft
from nxdt_plugin_migrate.config.renamed_keys import LOSES_NOTHING, LOST, MOVED, NNM_MOVED

__all__ = ["from_nemo", "from_nnm"]

_PRECISION = "precision.type"
_OPTIMIZER = "model.optim.name"
_SAVING = "exp_manager.checkpoint_callback_params"
_ACTIVATION = "model.activation"


def from_nemo(draft: Draft, kernel: Kernel) -> None:
    """Turn a draft of NeMo's keys into one of this schema."""
    _nemo_precision(draft)
    _nemo_saving(draft)
    _to_nxdt(draft, kernel)


def from_nnm(draft: Draft, kernel: Kernel) -> None:
    """Turn a draft of neuronx-nemo-megatron's keys into one of this schema."""
    for path, target in NNM_MOVED.items():
        draft.move(path, target)
    _nnm_precision(draft)
    _to_nxdt(draft, kernel)


def _to_nxdt(draft: Draft, kernel: Kernel) -> None:
    draft.put("model_source", "megatron", "its models are Megatron's")
    for path, target in MOVED.items():
        draft.move(path, target)
    _experts(draft)
    take_peft(draft)
    _fine_tuning(draft)
    _optimizer(draft)
    _architecture(draft)
    for path, (reason, neutral) in LOST.items():
        asks = [key for key in draft.below(path) if draft.value(key) not in neutral]
        draft.drop(path, "unsupported" if asks else "off", reason)
    for path, reason in LOSES_NOTHING.items():
        draft.drop(path, "unneeded", reason)
    if draft.value("trainer.max_epochs") not in (None, -1) and draft.value("trainer.max_steps"):
        draft.drop("trainer.max_epochs", "unneeded", "trainer.max_steps ends the run, as it does there")
    take_nxdt_keys(draft, kernel)


def _nemo_saving(draft: Draft) -> None:
    """Save after each validation, as NeMo does where the file gives no interval."""
    steps = draft.value("trainer.val_check_interval")
    intervals = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
    given = any(draft.value(f"{_SAVING}.{name}") is not None for name in intervals)
    if isinstance(steps, int) and not given:
        draft.put("checkpoint.every_n_train_steps", steps, "NeMo saves after each validation unless the file says when")


def _experts(draft: Draft) -> None:
    """Write what NeMo does where a key of experts is missing; NxD Training does something else."""
    if draft.has("model.moe.num_experts"):
        draft.put("model.moe.capacity_factor", None, "NeMo drops no tokens where the file gives no capacity")
        draft.put("model.moe.router_aux_loss_coef", 0.0, "the default there")
        draft.put("model.moe.output_router_logits", True, "NeMo adds the loss of the router, times its coefficient")


def _fine_tuning(draft: Draft) -> None:
    """Drop the data sets that only fine-tuning reads, and say so where the file asks for it."""
    asks = draft.value("data.fine_tuning") or (draft.has("data.train_ds") and not draft.has("data.data_prefix"))
    for name in ("train_ds", "validation_ds", "test_ds"):
        if asks:
            draft.drop(f"data.{name}", "unsupported", "set data.name: sft-chat and its train_files and val_files")
        else:
            draft.drop(f"data.{name}", "off", "only data.fine_tuning: true reads it")


def _optimizer(draft: Draft) -> None:
    name = draft.value(_OPTIMIZER)
    if name in ("fused_adam", "megatron_fused_adam"):
        draft.change(_OPTIMIZER, "adamw", "NeMo's fused Adam decays as AdamW; here torch's fused one is taken")
    elif name in ("distributed_fused_adam", "mcore_distributed_optim"):
        draft.change(_OPTIMIZER, "adamw", "its shards over data parallel ranks are distributed_strategy.zero1")
        draft.put("distributed_strategy.zero1", True, f"{name} shards the optimizer's state")


def _architecture(draft: Draft) -> None:
    activation = str(draft.value(_ACTIVATION, ""))
    if activation.startswith("fast-"):
        draft.change(_ACTIVATION, activation.removeprefix("fast-"), "the same function; fast- names a fused kernel")
    if draft.value("model.openai_gelu") and activation in ("gelu", ""):
        draft.drop("model.openai_gelu", "renamed", f"{_ACTIVATION}: gelu_tanh")
        draft.drop(_ACTIVATION, "renamed", "openai_gelu chooses the tanh form")
        draft.put(_ACTIVATION, "gelu_tanh", "openai_gelu: true")
    window: Any = draft.value("model.sliding_window_size")
    if isinstance(window, list) and window:
        draft.change("model.sliding_window_size", window[0], "tokens to the left; none to the right are seen")
    if draft.value("trainer.accelerator") in ("gpu", "tpu"):
        draft.drop("trainer.accelerator", "unneeded", "auto takes what the machine has")
    if draft.value("model.activations_checkpoint_granularity") is None:
        for key in ("method", "num_layers"):
            draft.drop(f"model.activations_checkpoint_{key}", "unneeded", "nothing is recomputed")


def _nemo_precision(draft: Draft) -> None:
    """Lightning's precision and Megatron's O2 switch together."""
    precision = str(draft.value("trainer.precision", "32"))
    masters = draft.value("model.megatron_amp_O2") or "distributed" in str(draft.value(_OPTIMIZER))
    if precision in ("32", "32-true"):
        chosen, reason = "fp32", "float32"
    elif precision in ("bf16", "bf16-mixed"):
        chosen = "mixed_precision" if masters else "autocast"
        reason = "bfloat16 with float32 masters" if masters else "float32 weights, bfloat16 in matrix products"
    elif precision == "bf16-true":
        chosen, reason = "bf16SR", "bfloat16 weights without masters; rounded stochastically, so that updates count"
    else:
        chosen = "mixed_precision" if masters else "autocast"
        reason = "float16 and its loss scale are not offered; bfloat16 needs no scale"
    _set_precision(draft, chosen, f"trainer.precision {precision}: {reason}")


def _nnm_precision(draft: Draft) -> None:
    """What the file says of it; the rest was said by the environment of the launch script."""
    masters = draft.value("model.zero_use_master_weight") or draft.value("model.megatron_amp_O2")
    if masters or draft.value("model.zero_use_fp32_grad_accum"):
        chosen, reason = "mixed_precision", "float32 masters and sums of gradients"
    else:
        chosen, reason = "fp32", "where the launch script set XLA_USE_BF16, the run was bf16SR: write that"
    for key in ("zero_use_master_weight", "zero_use_fp32_grad_accum"):
        draft.drop(f"model.{key}", "renamed", _PRECISION)
    _set_precision(draft, chosen, reason)


def _set_precision(draft: Draft, chosen: str, reason: str) -> None:
    draft.drop("trainer.precision", "renamed", f"{_PRECISION}: {chosen}")
    draft.drop("model.megatron_amp_O2", "renamed" if chosen == "mixed_precision" else "unneeded", _PRECISION)
    draft.put(_PRECISION, chosen, reason)
