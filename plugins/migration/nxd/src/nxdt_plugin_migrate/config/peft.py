"""What ``model.peft`` of NeMo and neuronx-nemo-megatron means: LoRA alone has a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxdt_plugin_migrate.config.document import Document

__all__ = ["take_peft"]

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


def take_peft(document: Document) -> None:
    """Turn the chosen scheme of ``model.peft`` into the section ``adapter``, and leave out the others."""
    scheme = document.value(f"{_PEFT}.peft_scheme")
    if scheme not in (None, "none", "lora"):
        document.drop(_PEFT, "unsupported", f"it asks for {scheme}; the only adapter here is LoRA (adapter.name: lora)")
    if scheme == "lora":
        _take_lora(document)
        if document.value(_SAVED) is not None:
            document.drop(_SAVED, "unsupported", "set adapter.load_lora_from_ckpt: true and adapter.lora_save_dir")
    for path in (_SAVED, *(f"{_PEFT}.{path.split('.')[2]}" for path in document.below(_PEFT) if path.count(".") > 1)):
        document.drop(
            path, "off", f"peft_scheme is {scheme or 'null'}" if path != _SAVED else "null: nothing is loaded"
        )
    document.drop(_PEFT, "off", "it is empty")


def _take_lora(document: Document) -> None:
    document.drop(f"{_PEFT}.peft_scheme", "renamed", "adapter.name: lora")
    document.put("adapter.name", "lora", "peft_scheme: lora")
    for old, new in _RENAMED.items():
        document.move(f"{_LORA}.{old}", f"adapter.{new}")
    rank = document.value("adapter.lora_rank")
    if rank is not None:
        document.put(_ALPHA, rank, "alpha is adapter_dim there unless the file says otherwise: updates are not scaled")
    document.put("adapter.lora_dropout", 0.0, "the default there")
    _target_modules(document)
    for name, (reason, neutral) in _NEUTRAL.items():
        path = f"{_LORA}.{name}"
        document.drop(path, "unneeded" if document.value(path) in neutral else "unsupported", reason)
    document.drop(f"{_LORA}.norm_type", "unneeded", "LoRA has no norm")


def _target_modules(document: Document) -> None:
    there, here = f"{_LORA}.target_modules", "adapter.target_modules"
    names: Any = document.value(there)
    if not isinstance(names, list):
        document.put(here, ["qkv_proj"], "the projection of queries, keys and values is the default there")
        return
    ours = [one for name in names for one in _MODULES.get(str(name), (str(name),))]
    document.move(there, here)
    document.change(here, list(dict.fromkeys(ours)), "the names that these layers have here")
