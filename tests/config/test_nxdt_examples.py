"""Files of NxD Training: every key is known; what this version lacks is said in words, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.config.complete import complete
from nxdt_core.config.keys import keys_of
from nxdt_core.config.node import from_plain
from nxdt_core.config.overrides import COMMAND_LINE
from nxdt_core.config.schema.legacy import LEGACY
from nxdt_core.config.slots import Composition
from nxdt_core.kernel import Kernel, PluginPolicy

EXAMPLES = Path(__file__).parent / "nxdt"

EXPECTED = {
    "llama3_8b_pretrain": {"data.name", "model.name", "model.optim.name", "precision.type"},
    "mixtral_8x7b_pretrain": {"data.name", "model.name", "precision.type"},
    # As shipped, data.seq_length and model.encoder_seq_length differ.
    "llama3_8b_sft": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "precision.type"},
    "llama3_8b_lora": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "adapter.name"},
}


@pytest.fixture(scope="module")
def builtins() -> Kernel:
    return Kernel.start(PluginPolicy(allow=()))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_names_what_is_not_supported_and_nothing_else(builtins, name):
    problems = config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)
    assert {problem.key for problem in problems} - EXPECTED[name] == set()
    codes = {problem.row()[-10:-1] for problem in problems}
    assert codes <= {"NXDT-C014", "NXDT-C015", "NXDT-K002"}
    assert not [problem for problem in problems if problem.code in ("NXDT-C010", "NXDT-C011", "NXDT-C012")]


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_that_was_expected_to_be_refused_is_taken(builtins, name):
    keys = {problem.key for problem in config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)}
    aliases = {"adamw_fp32OptState", "mixed_precision"}
    known = {alias for kind in ("optimizer", "precision_policy") for alias in _spellings(builtins, kind)} & aliases
    taken = {"model.optim.name" if alias.startswith("adamw") else "precision.type" for alias in known}
    assert EXPECTED[name] - keys <= taken


def _spellings(kernel, kind):
    return {text for found in kernel.registry.all(kind) for text in (found.record.name, *found.record.aliases)}


TABLE = """
name model_source seed compiler_flags compiler_cache_url aync_exec_max_inflight_requests bucket_size_collectives
neuron_rt_exec_timeout neuron_experimental_compress_rg
trainer: devices num_nodes lnc max_epochs max_steps min_steps min_epochs max_time log_every_n_steps val_check_interval
    check_val_every_n_epoch num_sanity_val_steps limit_train_batches limit_val_batches limit_test_batches
    limit_predict_batches gradient_clip_val gradient_clip_algorithm sequential_move_factor accumulate_grad_batches
    enable_model_summary precision fast_dev_run overfit_batches profiler detect_anomaly
    reload_dataloaders_every_n_epochs inference_mode use_distributed_sampler
exp_manager: explicit_log_dir exp_dir name version use_datetime_version resume_if_exists resume_past_end
    resume_ignore_no_checkpoint resume_from_checkpoint ckpt_ptl_version create_tensorboard_logger summary_writer_kwargs
    create_wandb_logger wandb_logger_kwargs create_mlflow_logger mlflow_logger_kwargs create_checkpoint_callback
    log_parameter_norm log_gradient_norm save_xser load_xser save_bf16 async_checkpointing
    enable_recovery_time_instrumentation log_local_rank_0_only log_global_rank_0_only log_step_timing
    step_timing_kwargs disable_validation_on_resume files_to_copy create_early_stopping_callback
    create_preemption_callback create_straggler_detection_callback create_fault_tolerance_callback max_time
    seconds_to_sleep
exp_manager.ema: enable decay apply_ema_every_n_steps start_step evaluate_ema_weights_instead
exp_manager.checkpoint_callback_params: monitor mode save_top_k save_last filename dirpath prefix postfix
    every_n_train_steps train_time_interval every_n_epochs save_on_train_epoch_end save_nemo_on_train_end
    save_weights_only save_best_model always_save_nemo model_parallel_size use_master_weights_in_ckpt
    enable_version_counter async_save save_last_n_optim_states
distributed_strategy: tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size token_shuffle_group_size zero1 sequence_parallel kv_replicator
    pipeline_model_parallel_split_rank
data: micro_batch_size global_batch_size train_dir val_dir test_dir shuffle num_workers data_prefix index_mapping_dir
    data_impl splits_string seq_length skip_warmup dataloader_type reset_position_ids reset_attention_mask
    eod_mask_loss validation_drop_last no_seqlen_plus_one_input_tokens pad_samples_to_global_batch_size fine_tuning
    train_ds validation_ds test_ds dev_choose_samples dataset_name subset_name prompt_name packing
    use_sft_style_data_module
data.tokenizer: library type model vocab_file merge_file delimiter sentencepiece_legacy use_fast
model: model_config encoder_seq_length max_position_embeddings num_layers hidden_size rope_theta qkv_linear fuse_qkv
    transpose_nki_inputs pipeline_cuts use_cpu_initialization weight_init_only activations_checkpoint_granularity
    activations_checkpoint_recompute do_layer_norm_weight_decay save_logits make_vocab_size_divisible_by moe
    ffn_hidden_size num_attention_heads num_kv_heads kv_channels init_method_std use_scaled_init_method hidden_dropout
    attention_dropout ffn_dropout apply_query_key_layer_scaling normalization layernorm_epsilon persist_layer_norm
    share_embeddings_and_output_weights position_embedding_type rotary_percentage position_freq_base
    position_abf_factor positition_interpolation_factor activation transformer_block_type has_bias
    sliding_window_size fp32_residual_connection fp16_lm_cross_entropy gradient_accumulation_fusion use_emha
    activations_checkpoint_num_layers bias_dropout_add_fusion bias_activation_fusion moe_dropout
model.fusions: softmax flash_attention ring_attention
model.optim: name lr weight_decay betas eps capturable
model.optim.sched: name warmup_steps constant_steps min_lr max_steps
precision: type master_weights fp32_grad_acc xla_use_bf16 xla_downcast_bf16 neuron_rt_stochastic_rounding_en
    fp32_grads_cc parallel_layers_reduce_dtype
model_alignment_strategy.sft: packing
model_alignment_strategy.dpo: kl_beta loss_type max_prompt_length precompute_ref_log_probs truncation_mode
model_alignment_strategy.orpo: beta max_prompt_length truncation_mode
model_alignment_strategy.peft: lora_rank lora_alpha lora_dropout lora_bias lora_verbose target_modules
    load_lora_from_ckpt save_lora_base merge_lora save_lora_config_adapter merge_sharded_lora
"""
"""The keys of NxD Training 1.6, section by section."""


def table():
    section = ""
    for line in TABLE.strip().splitlines():
        if ":" in line:
            section, _, line = line.partition(":")
            section += "."
        yield from (f"{section}{name}" for name in line.split())


def test_every_key_of_nxd_training_is_known():
    parts = {"sft": {}, "dpo": {}, "orpo": {}, "peft": {}}
    sections = {"model_alignment_strategy": parts, "data": {"tokenizer": {}}}
    known = set(complete(from_plain(sections, COMMAND_LINE), Composition()).known)
    known |= {f"{section}.{name}" for section, cls in LEGACY.items() for name in keys_of(cls)}
    assert sorted(set(table()) - known) == []
