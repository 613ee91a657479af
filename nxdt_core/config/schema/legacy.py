"""Keys of NxD Training that belong to components there and that a selected component need not know.

Where a component declares a key of that name, its own type counts. Elsewhere the value given here as default requests
nothing; any other is an error, so that no setting is dropped silently.

These classes only hold fields and are never instantiated, so ``@dataclass`` writes no methods (7 ms of every start).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from nxdt_core.config.annotations import NoEffect, XlaOnly

__all__ = ["LEGACY", "PROGRAM"]

PROGRAM = ("nxdt", "NxD Training")
"""Migration of files with such keys, and the program that they are of."""

_GRAPH = "the step counter stays where the optimizer keeps it"
_MANUAL = "only the precision policy 'manual' reads it"


@dataclass(init=False, repr=False, eq=False)
class LegacyModelKeys:
    """Section ``model``: architectures of NxD Training, and what its checks refuse."""

    max_position_embeddings: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    rope_theta: float | None = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int | None = None
    moe: Mapping[str, Any] | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    kv_channels: int | None = None
    init_method_std: float | None = None
    use_scaled_init_method: bool | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    apply_query_key_layer_scaling: Annotated[bool, NoEffect("its two factors cancel out")] = False
    normalization: str | None = None
    layernorm_epsilon: float | None = None
    persist_layer_norm: Annotated[bool, XlaOnly()] = False
    share_embeddings_and_output_weights: bool | None = None
    position_embedding_type: str | None = None
    rotary_percentage: float = 1.0
    position_freq_base: float | None = None
    position_abf_factor: float = 1.0
    positition_interpolation_factor: float = 1.0
    activation: str | None = None
    transformer_block_type: str = "pre_ln"
    has_bias: bool = False
    sliding_window_size: int | None = None
    fp32_residual_connection: bool = False
    fp16_lm_cross_entropy: bool = False
    megatron_amp_O2: bool = False
    gradient_accumulation_fusion: bool = False
    use_emha: bool = False
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None
    activations_checkpoint_layers_per_pipeline: int | None = None
    num_micro_batches_with_partial_activation_checkpoints: int | None = None
    bias_dropout_add_fusion: bool = False
    bias_activation_fusion: bool = False
    moe_dropout: float = 0.0


@dataclass(init=False, repr=False, eq=False)
class LegacyDataKeys:
    """Section ``data``: the three data modules of NxD Training."""

    train_dir: str | None = None
    val_dir: str | None = None
    test_dir: str | None = None
    data_prefix: Any = None
    index_mapping_dir: str | None = None
    data_impl: str | None = None
    splits_string: str | None = None
    skip_warmup: Annotated[bool, NoEffect("files are mapped, not read ahead")] = True
    dataloader_type: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    validation_drop_last: bool = False
    no_seqlen_plus_one_input_tokens: bool = False
    pad_samples_to_global_batch_size: bool = False
    fine_tuning: bool = False
    train_ds: Mapping[str, Any] | None = None
    validation_ds: Mapping[str, Any] | None = None
    test_ds: Mapping[str, Any] | None = None
    dev_choose_samples: int | None = None
    dataset_name: str | None = None
    subset_name: str | None = None
    prompt_name: str | None = None
    packing: bool = False
    use_sft_style_data_module: Annotated[bool, NoEffect("data.name chooses the data")] = False


@dataclass(init=False, repr=False, eq=False)
class LegacyTokenizerKeys:
    """Keys of NxD Training in the section ``data.tokenizer``."""

    type: str | None = None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    delimiter: str | None = None
    sentencepiece_legacy: bool = False
    use_fast: bool | None = None


@dataclass(init=False, repr=False, eq=False)
class LegacyOptimKeys:
    """Keys of NxD Training in the section ``model.optim``."""

    betas: tuple[float, float] | None = None
    eps: float | None = None
    capturable: Annotated[bool, NoEffect(_GRAPH)] = False


@dataclass(init=False, repr=False, eq=False)
class LegacySchedKeys:
    """Keys of NxD Training in the section ``model.optim.sched``."""

    warmup_steps: int = 0
    constant_steps: int = 0
    min_lr: float = 0.0


@dataclass(init=False, repr=False, eq=False)
class LegacyPrecisionKeys:
    """Keys of NxD Training in the section ``precision``."""

    master_weights: Annotated[bool, NoEffect(_MANUAL)] = False
    fp32_grad_acc: Annotated[bool, NoEffect(_MANUAL)] = False
    xla_use_bf16: Annotated[bool | int | str, XlaOnly()] = False
    xla_downcast_bf16: Annotated[bool | int | str, XlaOnly()] = False
    neuron_rt_stochastic_rounding_en: Annotated[bool | int | str, XlaOnly()] = False
    fp32_grads_cc: Annotated[bool, NoEffect("NxD Training never read it")] = False
    parallel_layers_reduce_dtype: Annotated[str | None, NoEffect("the precision policy says it")] = None


LEGACY: Mapping[str, type] = {
    "model": LegacyModelKeys,
    "model.optim": LegacyOptimKeys,
    "model.optim.sched": LegacySchedKeys,
    "data": LegacyDataKeys,
    "data.tokenizer": LegacyTokenizerKeys,
    "precision": LegacyPrecisionKeys,
}
"""By section."""
