"""Meaning of ``model.peft`` of NeMo and neuronx-nemo-megatron: only LoRA has a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.config.document import Document
from nxdt_plugin_migrate.config.nxdt import take_nxdt_keys
from nxdt_plugin_migrate.config.renamed_keys import LOSES_NOTHING, LOST, MOVED, NNM_MOVED

_PEFT = "model.peft"
_LORA = f"{_PEFT}.lora_tuning"
_SAVED = f"{_PEFT}.restore_from_path"
_ALPHA = "adapter.lora_alpha"

_MODULES: Mapping[str, tuple[str, ...]] = {
    "attention_qkv": ("qkv_proj",),
    "attention_dense": ("o_proj",),
    "mlp_fc1": ("gate_up_proj",),
    "mlp_fc2": ("down_proj",),
    "attention": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
    "all": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
"""Value of ``target_modules`` there → ours."""

_RENAMED: Mapping[str, str] = {
    "adapter_dim": "lora_rank",
    "adapter_dropout": "lora_dropout",
    "dropout": "lora_dropout",
    "alpha": "lora_alpha",
}

_NEUTRAL: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "column_init_method": ("A starts uniform within 1 / sqrt(inputs) here", ("xavier",)),
    "row_init_method": ("B starts at zero here", ("zero",)),
    "layer_selection": ("every layer gets an update; adapter.target_modules can name layers", (None,)),
    "weight_tying": ("layers do not share updates", (None, False)),
    "position_embedding_strategy": ("layers do not share updates", (None,)),
}
"""Keys of LoRA without a counterpart: why, and the values that ask for nothing else than what is done here."""


_PRECISION = "precision.type"
_OPTIMIZER = "model.optim.name"
_SAVING = "exp_manager.checkpoint_callback_params"
_ACTIVATION = "model.activation"


def take_peft(document: Document) -> None:
    """Turn the chosen scheme of ``model.peft`` into the section ``adapter``, and leave out the others."""
    scheme = document.value(f"{_PEFT}.peft_scheme")
    if scheme not in (None, "none", "lora"):
        document.drop(_PEFT, "unsupported", f"it asks for {scheme}; the only adapter here is LoRA (adapter.name: lora)")
    if scheme == "lora":
        document.drop(f"{_PEFT}.peft_scheme", "renamed", "adapter.name: lora")
        document.put("adapter.name", "lora", "peft_scheme: lora")
        for old, new in _RENAMED.items():
            document.move(f"{_LORA}.{old}", f"adapter.{new}")
        rank = document.value("adapter.lora_rank")
        if rank is not None:
            document.put(
                _ALPHA, rank, "alpha is adapter_dim there unless the file says otherwise: updates are not scaled"
            )
        document.put("adapter.lora_dropout", 0.0, "the default there")
        theirs, ours = f"{_LORA}.target_modules", "adapter.target_modules"
        names: Any = document.value(theirs)
        if isinstance(names, list):
            modules = [one for name in names for one in _MODULES.get(str(name), (str(name),))]
            document.move(theirs, ours)
            document.change(ours, list(dict.fromkeys(modules)), "the names that these layers have here")
        else:
            document.put(ours, ["qkv_proj"], "the projection of queries, keys and values is the default there")
        for name, (reason, neutral) in _NEUTRAL.items():
            path = f"{_LORA}.{name}"
            document.drop(path, "unneeded" if document.value(path) in neutral else "unsupported", reason)
        document.drop(f"{_LORA}.norm_type", "unneeded", "LoRA has no norm")
        if document.value(_SAVED) is not None:
            document.drop(_SAVED, "unsupported", "set adapter.load_lora_from_ckpt: true and adapter.lora_save_dir")
    for path in (_SAVED, *(f"{_PEFT}.{path.split('.')[2]}" for path in document.below(_PEFT) if path.count(".") > 1)):
        document.drop(
            path, "off", f"peft_scheme is {scheme or 'null'}" if path != _SAVED else "null: nothing is loaded"
        )
    document.drop(_PEFT, "off", "it is empty")


def from_nemo(document: Document, kernel: Kernel) -> None:
    """Turn a document of NeMo's keys into one of this schema."""
    # Lightning's precision and Megatron's O2 switch together.
    precision = str(document.value("trainer.precision", "32"))
    masters = document.value("model.megatron_amp_O2") or "distributed" in str(document.value(_OPTIMIZER))
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
    _set_precision(document, chosen, f"trainer.precision {precision}: {reason}")

    # NeMo saves after each validation where the file gives no interval.
    steps = document.value("trainer.val_check_interval")
    intervals = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
    has_interval = any(document.value(f"{_SAVING}.{name}") is not None for name in intervals)
    if isinstance(steps, int) and not has_interval:
        document.put(
            "checkpoint.every_n_train_steps", steps, "NeMo saves after each validation unless the file says when"
        )
    _to_nxdt(document, kernel)


def from_nnm(document: Document, kernel: Kernel) -> None:
    """Turn a document of neuronx-nemo-megatron's keys into one of this schema."""
    for path, target in NNM_MOVED.items():
        document.move(path, target)
    # The keys of precision that the file has; the environment of the launch script said the rest.
    masters = document.value("model.zero_use_master_weight") or document.value("model.megatron_amp_O2")
    if masters or document.value("model.zero_use_fp32_grad_accum"):
        chosen, reason = "mixed_precision", "float32 masters and sums of gradients"
    else:
        chosen, reason = "fp32", "where the launch script set XLA_USE_BF16, the run was bf16SR: write that"
    for key in ("zero_use_master_weight", "zero_use_fp32_grad_accum"):
        document.drop(f"model.{key}", "renamed", _PRECISION)
    _set_precision(document, chosen, reason)
    _to_nxdt(document, kernel)


def _to_nxdt(document: Document, kernel: Kernel) -> None:
    document.put("model_source", "megatron", "its models are Megatron's")
    for path, target in MOVED.items():
        document.move(path, target)
    # What NeMo does where a key of experts is missing; NxD Training does something else.
    if document.has("model.moe.num_experts"):
        document.put("model.moe.capacity_factor", None, "NeMo drops no tokens where the file gives no capacity")
        document.put("model.moe.router_aux_loss_coef", 0.0, "the default there")
        document.put("model.moe.output_router_logits", True, "NeMo adds the loss of the router, times its coefficient")
    take_peft(document)

    # Data sets that only fine-tuning reads.
    asks = document.value("data.fine_tuning") or (
        document.has("data.train_ds") and not document.has("data.data_prefix")
    )
    for name in ("train_ds", "validation_ds", "test_ds"):
        if asks:
            document.drop(f"data.{name}", "unsupported", "set data.name: sft-chat and its train_files and val_files")
        else:
            document.drop(f"data.{name}", "off", "only data.fine_tuning: true reads it")
    name = document.value(_OPTIMIZER)
    if name in ("fused_adam", "megatron_fused_adam"):
        document.change(_OPTIMIZER, "adamw", "NeMo's fused Adam decays as AdamW; here torch's fused one is taken")
    elif name in ("distributed_fused_adam", "mcore_distributed_optim"):
        document.change(_OPTIMIZER, "adamw", "its shards over data parallel ranks are distributed_strategy.zero1")
        document.put("distributed_strategy.zero1", True, f"{name} shards the optimizer's state")

    activation = str(document.value(_ACTIVATION, ""))
    if activation.startswith("fast-"):
        document.change(_ACTIVATION, activation.removeprefix("fast-"), "the same function; fast- names a fused kernel")
    if document.value("model.openai_gelu") and activation in ("gelu", ""):
        document.drop("model.openai_gelu", "renamed", f"{_ACTIVATION}: gelu_tanh")
        document.drop(_ACTIVATION, "renamed", "openai_gelu chooses the tanh form")
        document.put(_ACTIVATION, "gelu_tanh", "openai_gelu: true")
    window: Any = document.value("model.sliding_window_size")
    if isinstance(window, list) and window:
        document.change("model.sliding_window_size", window[0], "tokens to the left; none to the right are seen")
    if document.value("trainer.accelerator") in ("gpu", "tpu"):
        document.drop("trainer.accelerator", "unneeded", "auto takes what the machine has")
    if document.value("model.activations_checkpoint_granularity") is None:
        for key in ("method", "num_layers"):
            document.drop(f"model.activations_checkpoint_{key}", "unneeded", "nothing is recomputed")

    for path, (reason, neutral) in LOST.items():
        asks = [key for key in document.below(path) if document.value(key) not in neutral]
        document.drop(path, "unsupported" if asks else "off", reason)
    for path, reason in LOSES_NOTHING.items():
        document.drop(path, "unneeded", reason)
    if document.value("trainer.max_epochs") not in (None, -1) and document.value("trainer.max_steps"):
        document.drop("trainer.max_epochs", "unneeded", "trainer.max_steps ends the run, as it does there")
    take_nxdt_keys(document, kernel)


def _set_precision(document: Document, chosen: str, reason: str) -> None:
    document.drop("trainer.precision", "renamed", f"{_PRECISION}: {chosen}")
    document.drop("model.megatron_amp_O2", "renamed" if chosen == "mixed_precision" else "unneeded", _PRECISION)
    document.put(_PRECISION, chosen, reason)
