"""The table of legacy keys: what each became here, or why none is needed.

It has the keys that NxD Training, NeMo and neuronx-nemo-megatron have and nxdt does not. Where one is on a command
line, the message names the key of today.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nxdt_core.protocols.migration import KeyMeaning
from nxdt_plugin_migrate.config.nxdt_keys import IGNORED, by_key, nxdt_keys

_SAVING = "exp_manager.checkpoint_callback_params"
_STOPPING = "exp_manager.early_stopping_callback_params"

RENAMED: Mapping[str, str] = {
    "distributed_strategy.kv_shared_group_size": "distributed_strategy.kv_replicator",
    "distributed_strategy.kv_size_multiplier": "distributed_strategy.kv_replicator",
    f"{_SAVING}.dirpath": "checkpoint.uri",
    **{
        f"{_SAVING}.{name}": f"checkpoint.{name}"
        for name in (
            *("monitor", "mode", "save_top_k", "save_last", "every_n_train_steps", "every_n_epochs"),
            *("train_time_interval", "async_save", "use_master_weights_in_ckpt"),
        )
    },
    "exp_manager.resume_if_exists": "checkpoint.resume_if_exists",
    "exp_manager.resume_ignore_no_checkpoint": "checkpoint.resume_ignore_no_checkpoint",
    "exp_manager.resume_from_checkpoint": "checkpoint.resume_from",
    "exp_manager.create_checkpoint_callback": "checkpoint.enabled",
    "exp_manager.async_checkpointing": "checkpoint.async_save",
    "exp_manager.save_bf16": "checkpoint.save_bf16",
    "exp_manager.max_time_per_run": "trainer.max_time",
    "exp_manager.max_time": "trainer.max_time",
    "model.encoder_seq_length": "data.seq_length",
    "model.weight_init_only": "checkpoint.weight_init_only",
}
"""Keys of NxD Training → of the schema, which has them under this name alone."""

SAID_BY: Mapping[str, str] = {
    "model_source": "model.name",
    "data.dataloader_type": "data.shuffle",
    "model.fusions.ring_attention": "distributed_strategy.context_parallel_method",
}
"""Keys of NxD Training → of the schema, which says the same with other values."""

SECTIONS: Mapping[str, tuple[str, str | None]] = {
    "sft": ("data", None),
    "dpo": ("objective", "dpo"),
    "orpo": ("objective", "orpo"),
    "peft": ("adapter", "lora"),
}
"""Part of ``model_alignment_strategy`` → section that has its keys, and the component that its presence means."""

ALIGNMENT: Mapping[str, str] = {
    f"model_alignment_strategy.{part}.{name}": f"data.{name}"
    for part in ("dpo", "orpo")
    for name in ("max_prompt_length", "truncation_mode")
}
"""Keys of its parts that say how records are cut."""

OF_PARTS: Mapping[str, str] = {
    key: ALIGNMENT.get(key, f"{SECTIONS[part][0]}.{name}")
    for key in nxdt_keys()
    if key.startswith("model_alignment_strategy.")
    for _, part, name in [key.split(".")]
}
"""Keys of ``model_alignment_strategy`` → of a component that the section here names."""

OF_ENGINE: Mapping[str, str] = {
    "compiler_flags": "parallel_engine.compiler_flags",
    "aync_exec_max_inflight_requests": "parallel_engine.async_exec_max_inflight_requests",
    "bucket_size_collectives": "parallel_engine.bucket_size_collectives",
    "neuron_rt_exec_timeout": "parallel_engine.neuron_rt_exec_timeout",
    "neuron_experimental_compress_rg": "parallel_engine.neuron_experimental_compress_rg",
    "model.fusions.softmax": "parallel_engine.fuse_softmax",
}
"""Settings of the Neuron compiler and runtime → keys of the engine ``nxd``."""

GONE = by_key(
    {
        "training reads no test split": "trainer: limit_test_batches",
        "training does not predict": "trainer: limit_predict_batches",
        "each rank draws its own part of the weights alone": "trainer: sequential_move_factor",
        "a run that has reached trainer.max_steps says so and ends": "exp_manager: resume_past_end",
        "grad_norm is always logged": "exp_manager: log_gradient_norm",
        "checkpoints have nxdt's own format": "exp_manager: save_xser load_xser ckpt_ptl_version",
        "step_time_s is always logged": "exp_manager: log_step_timing step_timing_kwargs",
        "a resume never validates at once": "exp_manager: disable_validation_on_resume",
        "SIGTERM always saves and stops": "exp_manager: create_preemption_callback",
        "ranks meet at a barrier": "exp_manager: seconds_to_sleep",
        "why a run stops is always said": f"{_STOPPING}: verbose",
        "metrics are judged after each validation": f"{_STOPPING}: check_on_train_epoch_end",
        "rank 0 speaks for all": f"{_STOPPING}: log_rank_zero_only",
        "checkpoints are named after their step": f"{_SAVING}: filename prefix postfix enable_version_counter",
        "the layout comes from distributed_strategy": f"{_SAVING}: model_parallel_size",
        "files are mapped, not read ahead": "data: skip_warmup",
        "data.name chooses the data": "data: use_sft_style_data_module",
        "the last batch of a validation is always filled up with samples that count for nothing": (
            "data: pad_samples_to_global_batch_size"
        ),
        "tokenizers here are the fast ones, with the same ids": "data.tokenizer: use_fast",
        "weights are drawn on the host, equal for every device": "model: use_cpu_initialization",
        "the engine chooses how attention is computed": """
            model: transpose_nki_inputs qkv_linear fuse_qkv model.fusions: flash_attention
        """,
        "its two factors cancel out": "model: apply_query_key_layer_scaling",
        "the compiler chooses how layer norms are computed": "model: persist_layer_norm",
        "the step counter stays where the optimizer keeps it": "model.optim: capturable",
        "only the precision policy 'manual' reads it": """
            precision: master_weights fp32_grad_acc xla_use_bf16 xla_downcast_bf16 neuron_rt_stochastic_rounding_en
        """,
        "NxD Training never read it": "precision: fp32_grads_cc",
        "the precision policy says it": "precision: parallel_layers_reduce_dtype",
        "checkpoints are the same in every layout": "adapter: merge_sharded_lora",
    }
)
"""Keys that say nothing here → why. A component that declares one reads it."""

_WHOLE = "a checkpoint is saved whole, so that a run can resume from it"
_EXPORT = "`nxdt checkpoint export` writes a model alone, and checkpoint.hf_every_n_saves does so with saves"
_NVIDIA = (
    "it is of NVIDIA's resiliency extension; here a rank that dies ends all ranks within seconds, and"
    " checkpoint.resume_if_exists resumes the run"
)
_SLOW = "slow ranks are not looked for; trainer.profiler: pytorch writes a trace of each rank to compare"
_UNREAD_DATA = "the dataloader that runs here does not read it"
_UNREAD_TOKENIZER = "the tokenizer does not read it"

NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    key: (neutral, reason)
    for neutral, keys_of in (
        (
            (False,),
            {
                "`nxdt plan` shows parameters, memory and FLOPs, also of each rank": "trainer: enable_model_summary",
                "the core hands out samples itself, each of them once": "trainer: use_distributed_sampler",
                "restarts are not timed; what saves cost is in saves.jsonl": """
                    exp_manager: enable_recovery_time_instrumentation
                """,
                _SLOW: "exp_manager: create_straggler_detection_callback",
                _NVIDIA: "exp_manager: create_fault_tolerance_callback",
                "checkpoint.every_n_epochs: 1 saves at the end of each pass over the data": f"""
                    {_SAVING}: save_on_train_epoch_end
                """,
                _EXPORT: f"{_SAVING}: save_nemo_on_train_end always_save_nemo",
                f"{_WHOLE}; {_EXPORT}": f"{_SAVING}: save_weights_only",
                "checkpoint.monitor and save_top_k keep the best checkpoint, which needs no second file": f"""
                    {_SAVING}: save_best_model
                """,
                "logits are not written; `nxdt generate` runs a model on a text": "model: save_logits",
                "distributed_strategy.context_parallel_method says it": "model.fusions: ring_attention",
                _UNREAD_DATA: """
                    data: reset_position_ids reset_attention_mask eod_mask_loss validation_drop_last
                    no_seqlen_plus_one_input_tokens fine_tuning packing
                """,
                _UNREAD_TOKENIZER: "data.tokenizer: sentencepiece_legacy",
                "": """
                    model: has_bias fp32_residual_connection fp16_lm_cross_entropy megatron_amp_O2 use_emha
                    gradient_accumulation_fusion bias_dropout_add_fusion bias_activation_fusion
                """,
            },
        ),
        (
            (),
            {
                "it splits encoders from decoders, and models here are decoders": """
                    distributed_strategy: pipeline_model_parallel_split_rank
                """,
                _SLOW: "exp_manager: straggler_detection_params",
                _NVIDIA: "exp_manager: fault_tolerance",
                "its samplers are single and cyclic": "data: dataloader_type",
                _UNREAD_DATA: """
                    data: train_dir val_dir test_dir data_prefix index_mapping_dir splits_string train_ds
                    validation_ds test_ds dev_choose_samples dataset_name subset_name prompt_name
                """,
                _UNREAD_TOKENIZER: "data.tokenizer: type model vocab_file merge_file delimiter",
                "the optimizer does not read it": "model.optim: betas eps",
                "": """
                    model: max_position_embeddings num_layers hidden_size rope_theta vocab_size ffn_hidden_size
                    make_vocab_size_divisible_by moe num_attention_heads num_kv_heads kv_channels init_method_std
                    use_scaled_init_method normalization layernorm_epsilon share_embeddings_and_output_weights
                    position_embedding_type position_freq_base activation sliding_window_size
                    activations_checkpoint_method activations_checkpoint_num_layers
                    activations_checkpoint_layers_per_pipeline num_micro_batches_with_partial_activation_checkpoints
                """,
            },
        ),
        (
            (0, 0.0),
            {
                "the schedule does not read it": "model.optim.sched: warmup_steps constant_steps min_lr",
                "": "model: hidden_dropout attention_dropout ffn_dropout moe_dropout",
            },
        ),
        ((0,), {"data are opened once, and passes follow each other": "trainer: reload_dataloaders_every_n_epochs"}),
        (
            (1,),
            {
                "data.global_batch_size and data.micro_batch_size decide how many micro-batches a step adds up": """
                    trainer: accumulate_grad_batches
                """
            },
        ),
        ((1, 1.0), {"": "model: rotary_percentage position_abf_factor positition_interpolation_factor"}),
        ((-1,), {f"{_WHOLE}; checkpoint.save_top_k bounds their number": f"{_SAVING}: save_last_n_optim_states"}),
        ((32, "32", "32-true"), {"precision.type decides": "trainer: precision"}),
        (("norm",), {"gradients are clipped by their norm": "trainer: gradient_clip_algorithm"}),
        (("mmap",), {"files are mapped into memory": "data: data_impl"}),
        (("pre_ln",), {"": "model: transformer_block_type"}),
    )
    for key, reason in by_key(keys_of).items()
}
"""Keys that ask for something unless they have one of these values or ``null``; and why that is not done. Those
without a reason are of an architecture: where the model does not read one, it stays, since without it the model would
be another."""

LLAMA_NAMES: Mapping[str, str] = {
    "model.position_freq_base": "model.rope_theta",
    "model.kv_channels": "model.head_dim",
    "model.sliding_window_size": "model.sliding_window",
}
"""Keys of NxD Training's ``megatron`` models → of the plugins for Llama, Mistral and Mixtral."""

MOVED: Mapping[str, str] = {
    **{
        f"model.{key}": f"distributed_strategy.{key}"
        for key in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "sequence_parallel"),
            "pipeline_model_parallel_split_rank",
        )
    },
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
"""Keys that neuronx-nemo-megatron adds → those of NxD Training."""

_RECOMPUTE = "whole layers or named modules are recomputed, on every stage"
_FP8 = "set precision.type: float8 of nxdt-plugin-torchao instead"
_ONE = "models here have no such variant"
_FINE_TUNING = "only that framework's fine-tuning reads it; for fine-tuning here, set data.name: sft-chat"
_NONE: tuple[Any, ...] = (None, False, 0)

LOSES_NOTHING = by_key(
    {
        "Hydra is not used": "hydra",
        "exp_manager names the loggers": "trainer: logger",
        "the section checkpoint says it": "trainer: enable_checkpointing",
        "the core hands out samples itself": "trainer: replace_sampler_ddp use_distributed_sampler",
        "distributed_strategy says it": "trainer: strategy",
        "nxdt plan prints the model's sizes": "trainer: enable_model_summary",
        "accumulation follows from the two batch sizes": "trainer: accumulate_grad_batches",
        "a checkpoint is deleted only after a newer one is committed": "enable_checkpoint_removal_protection",
        "the models are the plugins' own": "model: mcore_gpt",
        "models here have both ends, and the pipeline takes what a stage needs": "model: pre_process post_process",
        "bfloat16 and float32 need no loss scale": """
            model: native_amp_init_scale native_amp_growth_interval hysteresis
        """,
        "kernels are the engine's and the compiler's business": """
            trainer: benchmark
            model: bias_activation_fusion bias_dropout_add_fusion get_attention_mask_from_fusion apply_rope_fusion
            cross_entropy_loss_fusion use_flash_attention use_emha
        """,
        "a switch of NVIDIA's kernels and communication": """
            model: grad_allreduce_chunk_size_mb grad_div_ar_fusion gradient_accumulation_fusion overlap_p2p_comm
            batch_p2p_comm nccl_communicator_config_path sharp gradient_as_bucket_view sync_batch_comm
            transformer_engine ub_tp_comm_overlap ub_tp_comm_overlap_cfg
            model.optim: bucket_cap_mb overlap_grad_sync overlap_param_sync contiguous_grad_buffer
            contiguous_param_buffer
        """,
        "nothing is exported to ONNX": "model: onnx_safe",
        "Apex is not used": "model: apex_transformer_log_level",
        "model.pipeline_cuts can name any cuts": "model: flexible_pipeline_parallel_stages",
        _FP8: """
            model: fp8_e4m3 fp8_hybrid fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_params
            reduce_amax
        """,
        "Python collects garbage as it does": "model: gc_interval",
        "trainer.profiler: pytorch traces some steps of each rank": "model: nsys_profile",
        "nxdt checkpoint export writes that form": "model: convert_to_hf",
        "nxdt checkpoint export says where to": "model: output_dir",
        "nxdt checkpoint export writes config.json itself": "model: config_path",
        "logits are not saved": "model: save_logits_interval",
        _RECOMPUTE: "model: disable_layer_norm_checkpointing",
        "the precision policy says it": "model.optim: grad_sync_dtype",
        _FINE_TUNING: "data: chat",
        "one process per node builds the indices": "data: exchange_indices_distributed",
    }
)
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
"""Key or section → the reason why what it asks for is lost, and the values that ask for nothing."""


_WHOLE_SECTIONS: Mapping[str, str] = {
    "model_alignment_strategy": "its parts are the sections data, objective and adapter",
    _SAVING: "the section checkpoint has all of saving and resuming",
    "model.fusions": "distributed_strategy.context_parallel_method has ring attention, and parallel_engine the rest",
}
"""Sections of NxD Training → what says it here."""


def has_key(framework: str, key: str) -> bool:
    """Return whether ``nxdt``, ``nemo`` or ``nnm`` has a key; nxdt may have it, too."""
    gone, names = {*IGNORED}, {*nxdt_keys()}
    if framework != "nxdt":
        gone |= {*LOSES_NOTHING, *LOST}
        names |= {f"model.{name}" for name in names if name.startswith("data.")} | {*MOVED}
        names |= {f"model.{name.removeprefix('data.')}" for name in names if name.startswith("data.tokenizer.")}
    if framework == "nnm":
        names |= {*NNM_MOVED, "model.zero_use_master_weight", "model.zero_use_fp32_grad_accum"}
    return key in names or any(f"{key}.".startswith(f"{section}.") for section in gone)


def current_name(key: str, known: Collection[str]) -> str | None:
    """Return the key among ``known`` that says what ``key`` says elsewhere; None if there is none."""
    for names in (NNM_MOVED, MOVED, RENAMED, SAID_BY, OF_ENGINE, LLAMA_NAMES, OF_PARTS):
        key = names.get(key, key)
        if key in known:
            return key
    return None


def why_unneeded(key: str) -> tuple[str, str] | None:
    """Return why nothing here stands for a key, and the program that has it; None for any other key."""
    reason = LOSES_NOTHING.get(key) or LOST.get(key, (None,))[0]
    if reason is not None:
        return reason, "NeMo"
    reason = _WHOLE_SECTIONS.get(key) or GONE.get(key) or IGNORED.get(key)
    if key in OF_PARTS:
        reason = f"a component that the section {OF_PARTS[key].partition('.')[0]} names may read it, as {OF_PARTS[key]}"
    elif key in OF_ENGINE:
        reason = f"only the engine nxd reads it, as {OF_ENGINE[key]}"
    elif reason is None and (section := "model.moe" if key.startswith("model.moe.") else key) in NEUTRAL:
        reason = NEUTRAL[section][1] or "the selected model does not read it"
    return None if reason is None else (reason, "NxD Training")


def meaning(key: str, known: Collection[str]) -> KeyMeaning | None:
    """Return the key among ``known`` that says the same, or why none is needed; None for a key of no program."""
    if name := current_name(key, known):
        program = "neuronx-nemo-megatron" if key in NNM_MOVED else "NeMo" if key in MOVED else "NxD Training"
        return KeyMeaning(name=name, program=program)
    key = key if why_unneeded(key) else current_name(key, {*OF_ENGINE, *GONE, *NEUTRAL}) or MOVED.get(key, key)
    reason = why_unneeded(key)
    return None if reason is None else KeyMeaning(unneeded=reason[0], program=reason[1])
