"""Section ``model_alignment_strategy`` of NxD Training. The docstrings are the YAML reference.

Each part is an older spelling of keys of ``data``, ``objective`` or ``adapter``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxdt_core.config.annotations import NonNegativeFloat, PositiveInt, SourcePath

__all__ = ["AlignmentConfig", "DpoKeys", "OrpoKeys", "PeftKeys", "SftKeys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftKeys:
    """Supervised fine-tuning: keys of ``data``."""

    packing: bool | None = None
    """``data.packing``: several records in one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoKeys:
    """Direct preference optimisation: keys of ``objective`` named ``dpo`` and, on cutting, of ``data``."""

    kl_beta: NonNegativeFloat | None = None
    """Strength of the pull to the reference."""
    loss_type: str | None = None
    """Form of the loss."""
    max_prompt_length: PositiveInt | None = None
    """Tokens of a prompt."""
    precompute_ref_log_probs: bool | None = None
    """Score the data with the reference model before training."""
    truncation_mode: Literal["keep_start", "keep_end"] | None = None
    """Which end of a long prompt stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpoKeys:
    """Odds-ratio preference optimisation: keys of ``objective`` named ``orpo`` and, on cutting, of ``data``."""

    beta: NonNegativeFloat | None = None
    """Weight of the odds-ratio term."""
    max_prompt_length: PositiveInt | None = None
    """Tokens of a prompt."""
    truncation_mode: Literal["keep_start", "keep_end"] | None = None
    """Which end of a long prompt stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftKeys:
    """LoRA: keys of ``adapter`` named ``lora``."""

    lora_rank: PositiveInt | None = None
    """Rank of the update."""
    lora_alpha: NonNegativeFloat | None = None
    """Scale of the update, divided by the rank."""
    lora_dropout: NonNegativeFloat | None = None
    """Dropout before the update."""
    lora_bias: Literal["none", "all", "lora_only"] | None = None
    """Biases that train."""
    lora_verbose: bool | None = None
    """Print what was changed."""
    target_modules: tuple[str, ...] | None = None
    """Layers that get an update."""
    load_lora_from_ckpt: bool | None = None
    """Start from a saved adapter."""
    lora_save_dir: SourcePath | None = None
    """Location of the adapter to start from."""
    lora_load_tag: str | int | None = None
    """Step of the adapter to start from."""
    save_lora_base: bool | None = None
    """Save the base weights too."""
    merge_lora: bool | None = None
    """Save the merged weights."""
    save_lora_config_adapter: bool | None = None
    """Save the adapter's configuration."""
    merge_sharded_lora: bool | None = None
    """Merge the shards of an adapter on saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentConfig:
    """Fine-tuning. A part that is present is switched on."""

    sft: SftKeys | None = None
    """Supervised fine-tuning."""
    dpo: DpoKeys | None = None
    """Direct preference optimisation."""
    orpo: OrpoKeys | None = None
    """Odds-ratio preference optimisation."""
    peft: PeftKeys | None = None
    """LoRA."""
