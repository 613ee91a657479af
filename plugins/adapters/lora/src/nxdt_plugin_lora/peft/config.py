"""``adapter_config.json`` of peft, from and to the section ``adapter``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nxdt_plugin_lora.config import LoraConfig

__all__ = ["MERGE", "differences", "peft_config", "section_of", "unread"]

_SAME = {"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Theirs → ours: what decides on the values of the update."""
_THEIR_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
_UNREAD = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Features of peft that change what is computed or trained and are not implemented."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is; most others take the start out of it."""
MERGE = "Merge it into the model with peft (merge_and_unload), and start from that model."
"""What to do where no section here describes what a file has."""
_CONVERT = (
    "Convert it with peft (save_pretrained(..., path_initial_model_for_weight_conversion=DIR), where DIR is the "
    "adapter as it was before training), or merge it there (merge_and_unload) and start from that model."
)
_LAYERS = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")
"""What the names of the layers' weights end in that an adapter of ours has as target parameters."""
_CONVERTED = ("pissa", "corda", "olora", "lora_ga")
"""What the names of the starts begin with that peft converts."""


def peft_config(
    config: LoraConfig,
    *,
    base: str | None,
    targets: Iterable[str],
    whole: Iterable[str],
    modules: Iterable[str],
    transposed: bool,
    tied: bool = False,
    matrices: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the file's content.

    Args:
        config: of the run.
        base: name or path of the base model.
        targets: modules of transformers with an update.
        whole: modules that train whole.
        modules: all that could have an update.
        transposed: whether the base's matrices are stored as [in, out].
        tied: whether embedding and head train whole as one matrix.
        matrices: weights with an update that are targets by their own names.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{theirs: getattr(config, ours) for theirs, ours in _SAME.items()},
        "lora_dropout": config.lora_dropout,
        "bias": config.biases,
        "target_modules": shortened(targets, modules),
        "target_parameters": sorted(matrices) or None,
        "modules_to_save": sorted(whole) or None,
        "ensure_weight_tying": tied,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def section_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of the section ``adapter``; its targets are named as in transformers and left out."""
    return {
        "name": "lora",
        **{ours: theirs.get(name, _THEIR_DEFAULTS[name]) for name, ours in _SAME.items()},
        "lora_dropout": theirs.get("lora_dropout", 0.0),
        "lora_bias": theirs.get("bias", "none"),
    }


def shortened(targets: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the last words of ``targets``, where all modules that end so are among them; else whole paths."""
    chosen, by_leaf = set(targets), defaultdict(set)
    for module in {*modules, *chosen}:
        by_leaf[module.rpartition(".")[2]].add(module)
    short = {leaf for leaf, found in by_leaf.items() if found <= chosen and not leaf.isdigit()}
    return sorted(short | {module for module in chosen if module.rpartition(".")[2] not in short})


def differences(config: LoraConfig, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a file's adapter computes something else than ``config`` describes."""
    for name, ours in _SAME.items():
        found = theirs.get(name, _THEIR_DEFAULTS[name])
        if found != getattr(config, ours):
            yield f"{ours} is {found} there and {getattr(config, ours)} here"


def unread(theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a file's adapter has that no section here describes, and what to do about each."""
    start = theirs.get("init_lora_weights", True)
    if start not in _STARTS:
        remedy = _CONVERT if str(start).lower().startswith(_CONVERTED) else MERGE
        yield f"init_lora_weights is {start!r}, which is more than a start", remedy
    for name in _UNREAD:
        if theirs.get(name) and not (name == "target_parameters" and _of_layers(theirs[name])):
            yield f"it uses {name}, which is not implemented", MERGE


def _of_layers(parameters: Iterable[str]) -> bool:
    """Whether they are weights of layers, whose updates are the same under either way to name them."""
    return all(name.endswith(_LAYERS) for name in parameters)
