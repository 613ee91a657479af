"""Facts about NxD Training 1.6: its keys, and which of them its own code reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_MEGATRON = """
    ffn_hidden_size num_attention_heads num_kv_heads kv_channels init_method_std use_scaled_init_method hidden_dropout
    attention_dropout ffn_dropout apply_query_key_layer_scaling normalization layernorm_epsilon persist_layer_norm
    share_embeddings_and_output_weights position_embedding_type rotary_percentage position_freq_base
    position_abf_factor positition_interpolation_factor activation transformer_block_type has_bias
    sliding_window_size fp32_residual_connection fp16_lm_cross_entropy megatron_amp_O2 gradient_accumulation_fusion
    use_emha activations_checkpoint_method activations_checkpoint_num_layers
    activations_checkpoint_layers_per_pipeline num_micro_batches_with_partial_activation_checkpoints
    bias_dropout_add_fusion bias_activation_fusion moe_dropout
"""
_LORA = """
    lora_rank lora_alpha lora_dropout lora_bias lora_verbose target_modules
    load_lora_from_ckpt save_lora_base merge_lora save_lora_config_adapter merge_sharded_lora
"""
_KEYS = f"""
name model_source seed compiler_flags compiler_cache_url aync_exec_max_inflight_requests bucket_size_collectives
neuron_rt_exec_timeout neuron_experimental_compress_rg
trainer: devices num_nodes lnc max_epochs max_steps min_steps min_epochs max_time log_every_n_steps val_check_interval
    check_val_every_n_epoch num_sanity_val_steps limit_train_batches limit_val_batches limit_test_batches
    limit_predict_batches gradient_clip_val gradient_clip_algorithm sequential_move_factor accumulate_grad_batches
    enable_model_summary precision fast_dev_run overfit_batches profiler detect_anomaly
    reload_dataloaders_every_n_epochs inference_mode use_distributed_sampler
exp_manager: explicit_log_dir exp_dir name version use_datetime_version resume_if_exists resume_past_end
    resume_ignore_no_checkpoint resume_from_checkpoint ckpt_ptl_version create_tensorboard_logger summary_writer_kwargs
    create_wandb_logger wandb_logger_kwargs create_mlflow_logger mlflow_logger_kwargs create_dllogger_logger
    create_clearml_logger create_neptune_logger create_checkpoint_callback log_parameter_norm log_gradient_norm
    save_xser load_xser save_bf16 async_checkpointing enable_recovery_time_instrumentation log_local_rank_0_only
    log_global_rank_0_only log_step_timing step_timing_kwargs disable_validation_on_resume files_to_copy
    create_early_stopping_callback create_preemption_callback create_straggler_detection_callback
    create_fault_tolerance_callback max_time seconds_to_sleep
exp_manager.ema: enable decay apply_ema_every_n_steps start_step evaluate_ema_weights_instead
exp_manager.checkpoint_callback_params: monitor mode save_top_k save_last filename dirpath prefix postfix
    every_n_train_steps train_time_interval every_n_epochs save_on_train_epoch_end save_nemo_on_train_end
    save_weights_only save_best_model always_save_nemo model_parallel_size use_master_weights_in_ckpt
    enable_version_counter async_save save_last_n_optim_states
distributed_strategy: tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size token_shuffle_group_size zero1 sequence_parallel kv_replicator
    kv_shared_group_size kv_size_multiplier pipeline_model_parallel_split_rank
data: micro_batch_size global_batch_size train_dir val_dir test_dir shuffle num_workers data_prefix index_mapping_dir
    data_impl splits_string seq_length skip_warmup dataloader_type reset_position_ids reset_attention_mask
    eod_mask_loss validation_drop_last no_seqlen_plus_one_input_tokens pad_samples_to_global_batch_size fine_tuning
    train_ds validation_ds test_ds dev_choose_samples dataset_name subset_name prompt_name packing
    use_sft_style_data_module
data.tokenizer: library type model vocab_file merge_file delimiter sentencepiece_legacy use_fast
model: model_config encoder_seq_length max_position_embeddings num_layers hidden_size rope_theta qkv_linear fuse_qkv
    transpose_nki_inputs pipeline_cuts use_cpu_initialization weight_init_only activations_checkpoint_granularity
    activations_checkpoint_recompute do_layer_norm_weight_decay save_logits make_vocab_size_divisible_by {_MEGATRON}
model.fusions: softmax flash_attention ring_attention
model.moe: num_experts frequency dropout capacity_factor dropless glu_mlp routing_algorithm router_activation
    sinkhorn_iterations sinkhorn_tol top_k output_router_logits router_aux_loss_coef normalize_top_k_affinities
model.optim: name lr weight_decay betas eps capturable
model.optim.sched: name warmup_steps constant_steps min_lr max_steps
precision: type master_weights fp32_grad_acc xla_use_bf16 xla_downcast_bf16 neuron_rt_stochastic_rounding_en
    fp32_grads_cc parallel_layers_reduce_dtype
model_alignment_strategy.sft: packing
model_alignment_strategy.dpo: kl_beta loss_type max_prompt_length precompute_ref_log_probs truncation_mode
model_alignment_strategy.orpo: beta max_prompt_length truncation_mode
model_alignment_strategy.peft: {_LORA}
"""
UNREAD_VALUE: Mapping[str, str] = {
    "model_alignment_strategy.dpo.loss_type": "NxD Training reads no value here: its loss is always sigmoid",
    "model_alignment_strategy.dpo.precompute_ref_log_probs": "NxD Training reads no value here: it always precomputes",
}
"""Keys that are written on although their value is never read there."""
DATA_READERS: Mapping[str, frozenset[str]] = {
    name: frozenset(keys.split())
    for name, keys in {
        "hf-data": "train_dir val_dir test_dir",
        "megatron-data": """
            data_prefix index_mapping_dir data_impl splits_string seq_length skip_warmup num_workers dataloader_type
            reset_position_ids reset_attention_mask eod_mask_loss validation_drop_last no_seqlen_plus_one_input_tokens
            pad_samples_to_global_batch_size fine_tuning
        """,
        "preference": "train_dir val_dir test_dir dev_choose_samples seq_length",
        "sft-chat": """
            train_dir val_dir test_dir dev_choose_samples seq_length dataset_name subset_name prompt_name packing
        """,
    }.items()
}
"""By our dataloader: the keys of ``data`` that its counterpart there reads, in addition to batch sizes and the
tokenizer."""
UNREAD: Mapping[str, frozenset[str]] = {
    "hf": frozenset(_MEGATRON.split()),
    "megatron": frozenset(("model_config", "rope_theta", "qkv_linear", "fuse_qkv", "transpose_nki_inputs")),
}
"""Keys of ``model`` that the code of each ``model_source`` does not read."""
DEFAULTS: Mapping[str, Mapping[str, float | bool]] = {
    "gpt": {"model.hidden_dropout": 0.1},
    "llama": {"model.share_embeddings_and_output_weights": True},
    "mistral": {"model.rope_theta": 10_000.0, "model.share_embeddings_and_output_weights": True},
    "mixtral": {"model.rope_theta": 10_000.0, "model.share_embeddings_and_output_weights": True},
}
"""By our model: what a key that a ``megatron`` file lacks means there, where it means something else here."""
SEARCHED: Mapping[str, str] = {
    "context_parallel_size": "distributed_strategy.context_parallel_size",
    "ring_attention": "model.fusions.ring_attention",
    **{name: f"model_alignment_strategy.peft.{name}" for name in _LORA.split()},
}
"""Names that its ``get_attribute_from_cfg`` looks for in the whole file → where they belong."""


def keys_in(text: str) -> Iterator[str]:
    """Yield the key paths of a text such as ``seed trainer: devices max_steps model.optim: lr``."""
    section = ""
    for word in text.split():
        if word.endswith(":"):
            section = f"{word[:-1]}."
        else:
            yield section + word


def by_key(keys_of: Mapping[str, str]) -> dict[str, str]:
    """Return key path → reason, of a table of reasons and the texts of their keys."""
    return {key: reason for reason, keys in keys_of.items() for key in keys_in(keys)}


IGNORED = by_key(
    {
        "NxD Training names it and never reads it": """
            exp_manager: save_bf16 create_early_stopping_callback early_stopping_callback_params
            create_preemption_callback create_straggler_detection_callback straggler_detection_params
            create_fault_tolerance_callback fault_tolerance max_time max_time_per_run seconds_to_sleep
            precision: fp32_grads_cc
        """,
        "NxD Training switches this logger off in every case": """
            exp_manager: create_dllogger_logger dllogger_logger_kwargs create_clearml_logger clearml_logger_kwargs
            create_neptune_logger neptune_logger_kwargs
        """,
        "only the branch for fine_tuning reads it, and that cannot run": "data: train_ds validation_ds test_ds",
    }
)
"""Key or section → why nothing there reads it."""


def nxdt_keys() -> Iterator[str]:
    """Yield every key of its YAML files, in the order of its documentation."""
    return keys_in(_KEYS)
