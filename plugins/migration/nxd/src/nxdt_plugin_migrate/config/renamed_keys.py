"""Keys that NeMo, neuronx-nemo-megatron or older files of NxD Training name differently, and why others have none here.

Migrations move them; where ``nxdt train`` or ``nxdt config check`` read a file directly, the message names the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["LLAMA_NAMES", "LOSES_NOTHING", "LOST", "MOVED", "NNM_MOVED", "RENAMED", "current_name", "why_unneeded"]

RENAMED: Mapping[str, str] = {
    "distributed_strategy.kv_shared_group_size": "distributed_strategy.kv_replicator",
    "distributed_strategy.kv_size_multiplier": "distributed_strategy.kv_replicator",
}
"""Keys of NxD Training that the schema does not take under this name."""

LLAMA_NAMES: Mapping[str, str] = {
    "model.position_freq_base": "model.rope_theta",
    "model.kv_channels": "model.head_dim",
}
"""Keys of NxD Training's ``megatron`` models → of the plugins for Llama, Mistral and Mixtral."""

_STRATEGY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_split_rank",
)

MOVED: Mapping[str, str] = {
    **{f"model.{key}": f"distributed_strategy.{key}" for key in _STRATEGY},
    "model.micro_batch_size": "data.micro_batch_size",
    "model.global_batch_size": "data.global_batch_size",
    "model.tokenizer": "data.tokenizer",
    "model.data": "data",
    "model.seed": "seed",
    "model.resume_from_checkpoint": "exp_manager.resume_from_checkpoint",
    "model.num_query_groups": "model.num_kv_heads",
    "model.bias": "model.has_bias",
    "model.rotary_base": "model.position_freq_base",
    "model.seq_len_interpolation_factor": "model.positition_interpolation_factor",
    "model.window_size": "model.sliding_window_size",
    "model.masked_softmax_fusion": "model.fusions.softmax",
    "model.num_moe_experts": "model.moe.num_experts",
    "model.moe_router_topk": "model.moe.top_k",
    "model.moe_aux_loss_coeff": "model.moe.router_aux_loss_coef",
    "model.moe_expert_capacity_factor": "model.moe.capacity_factor",
}
"""Key or section of NeMo → of NxD Training."""

NNM_MOVED: Mapping[str, str] = {
    "model.wrap_with_zero": "distributed_strategy.zero1",
    "model.log_parameter_norm": "exp_manager.log_parameter_norm",
    "model.log_gradient_norm": "exp_manager.log_gradient_norm",
    "enable_recovery_time_instrumentation": "exp_manager.enable_recovery_time_instrumentation",
    "async_checkpointing": "exp_manager.async_checkpointing",
}
"""What neuronx-nemo-megatron adds → NxD Training's."""

_KERNEL = "kernels are the engine's and the compiler's business"
_SCALER = "bfloat16 and float32 need no loss scale"
_GPU = "a switch of NVIDIA's kernels and communication"
_MODEL = "models here have both ends, and the pipeline takes what a stage needs"
_RECOMPUTE = "whole layers or named modules are recomputed, on every stage"
_FP8 = "nothing computes in 8 bits here"
_ONE = "models here have no such variant"
_FINE_TUNING = "only that framework's fine-tuning reads it; for fine-tuning here, set data.name: sft-chat"
_NONE: tuple[Any, ...] = (None, False, 0)

LOSES_NOTHING: Mapping[str, str] = {
    "hydra": "Hydra is not used",
    "trainer.logger": "exp_manager names the loggers",
    "trainer.enable_checkpointing": "the section checkpoint says it",
    "trainer.replace_sampler_ddp": "the core hands out samples itself",
    "trainer.use_distributed_sampler": "the core hands out samples itself",
    "trainer.strategy": "distributed_strategy says it",
    "trainer.benchmark": _KERNEL,
    "trainer.enable_model_summary": "nxdt plan prints the model's sizes",
    "trainer.accumulate_grad_batches": "accumulation follows from the two batch sizes",
    "enable_checkpoint_removal_protection": "a checkpoint is deleted only after a newer one is committed",
    "model.mcore_gpt": "the models are the plugins' own",
    "model.pre_process": _MODEL,
    "model.post_process": _MODEL,
    "model.native_amp_init_scale": _SCALER,
    "model.native_amp_growth_interval": _SCALER,
    "model.hysteresis": _SCALER,
    "model.grad_allreduce_chunk_size_mb": _GPU,
    "model.grad_div_ar_fusion": _GPU,
    "model.gradient_accumulation_fusion": _GPU,
    "model.bias_activation_fusion": _KERNEL,
    "model.bias_dropout_add_fusion": _KERNEL,
    "model.get_attention_mask_from_fusion": _KERNEL,
    "model.apply_rope_fusion": _KERNEL,
    "model.cross_entropy_loss_fusion": _KERNEL,
    "model.use_flash_attention": _KERNEL,
    "model.use_emha": _KERNEL,
    "model.overlap_p2p_comm": _GPU,
    "model.batch_p2p_comm": _GPU,
    "model.nccl_communicator_config_path": _GPU,
    "model.sharp": _GPU,
    "model.onnx_safe": "nothing is exported to ONNX",
    "model.apex_transformer_log_level": "Apex is not used",
    "model.gradient_as_bucket_view": _GPU,
    "model.sync_batch_comm": _GPU,
    "model.flexible_pipeline_parallel_stages": "model.pipeline_cuts can name any cuts",
    "model.transformer_engine": _GPU,
    "model.fp8_e4m3": _FP8,
    "model.fp8_hybrid": _FP8,
    "model.fp8_margin": _FP8,
    "model.fp8_interval": _FP8,
    "model.fp8_amax_history_len": _FP8,
    "model.fp8_amax_compute_algo": _FP8,
    "model.fp8_params": _FP8,
    "model.reduce_amax": _FP8,
    "model.ub_tp_comm_overlap": _GPU,
    "model.ub_tp_comm_overlap_cfg": _GPU,
    "model.gc_interval": "Python collects garbage as it does",
    "model.nsys_profile": "profile with torch's profiler around nxdt train",
    "model.convert_to_hf": "nxdt checkpoint export writes that form",
    "model.output_dir": "nxdt checkpoint export says where to",
    "model.config_path": "nxdt checkpoint export writes config.json itself",
    "model.save_logits_interval": "logits are not saved",
    "model.disable_layer_norm_checkpointing": _RECOMPUTE,
    "model.optim.bucket_cap_mb": _GPU,
    "model.optim.overlap_grad_sync": _GPU,
    "model.optim.overlap_param_sync": _GPU,
    "model.optim.contiguous_grad_buffer": _GPU,
    "model.optim.contiguous_param_buffer": _GPU,
    "model.optim.grad_sync_dtype": "the precision policy says it",
    "data.chat": _FINE_TUNING,
    "data.exchange_indices_distributed": "one process per node builds the indices",
}
"""Key or section, as called after :data:`MOVED` → why nothing is lost without it."""

LOST: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "defaults": (
        "a list of other files that Hydra merges: have them written into one first (--cfg job --resolve prints it)",
        ("_self_", ["_self_"]),
    ),
    "restore_from_path": ("a .nemo archive is not read; convert it, then set checkpoint.resume_from", _NONE),
    "model.restore_from_path": ("a .nemo archive is not read; convert it, then set checkpoint.resume_from", _NONE),
    "model.rampup_batch_size": ("the global batch has one size", (None, [])),
    "model.fp8": (_FP8, _NONE),
    "model.fsdp": ("set distributed_strategy.zero_stage: 3", _NONE),
    "model.fp32_residual_connection": ("the residual stream has the dtype of the precision policy", _NONE),
    "model.fp16_lm_cross_entropy": ("the loss is always summed up in float32", _NONE),
    "model.megatron_amp_O2": ("precision.type decides", _NONE),
    "model.moe_dropout": ("model.moe.dropout falls inside experts, this one behind them", _NONE),
    "model.headscale": (_ONE, _NONE),
    "model.attention_type": ("num_kv_heads says how heads are shared", (None, "multihead")),
    "model.openai_gelu": ("it goes with the activation gelu alone", _NONE),
    "model.normalize_attention_scores": (_ONE, (None, True)),
    "model.layernorm_zero_centered_gamma": ("normalization: layernorm1p says it", _NONE),
    "model.activations_checkpoint_method": (_RECOMPUTE, (None, "uniform")),
    "model.activations_checkpoint_num_layers": (_RECOMPUTE, (None, 1)),
    "model.num_micro_batches_with_partial_activation_checkpoints": (_RECOMPUTE, _NONE),
    "model.activations_checkpoint_layers_per_pipeline": (_RECOMPUTE, _NONE),
    "data.fine_tuning": (_FINE_TUNING, _NONE),
    "data.mock_dataset": ("name data that exists", _NONE),
    "data.shuffle_documents": ("documents are always shuffled", (None, True)),
}
"""The same of what asks for something unless it has one of these values."""


def current_name(key: str, known: Collection[str]) -> str | None:
    """Return the key among ``known`` that says what ``key`` says elsewhere; None if there is none."""
    for names in (RENAMED, NNM_MOVED, MOVED, LLAMA_NAMES):
        key = names.get(key, key)
        if key in known:
            return key
    return None


def why_unneeded(key: str) -> str | None:
    """Return why nothing here stands for a key of NeMo or neuronx-nemo-megatron; None for any other key."""
    return LOSES_NOTHING.get(key) or LOST.get(key, (None,))[0]
