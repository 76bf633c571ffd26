"""How each option of TRL's `GRPOConfig` and `GRPOTrainer` is treated.

    HONOURED     works as in TRL
    STEPS_ASIDE  works as in TRL, and while it is set TRL's own code replaces some of ours
    IRRELEVANT   has no effect, with the reason

A test compares these lists with TRL's own fields, so a field that a new release adds is noticed. Unsupported values are
refused in `explorl.training.grpo.refusals`; docs/trl.md is generated from this module.
"""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS: Mapping[str, str] = {
    "model": "honoured; may also be one of our model names, such as smollm2-135m",
    "reward_funcs": "honoured",
    "args": "honoured",
    "train_dataset": "honoured",
    "eval_dataset": "honoured",
    "processing_class": "honoured",
    "reward_processing_classes": "honoured",
    "callbacks": "honoured",
    "optimizers": "honoured",
    "quantization_config": "honoured",
    "peft_config": "honoured",
    "tools": "honoured; the engine samples every turn with the strategies' options per row, and keeps its cache",
    "rollout_func": "honoured; replaces the engine, and completions end where the function ends them",
    "environment_factory": "honoured, like tools",
}
"""Arguments of `GRPOTrainer`."""

STEPS_ASIDE: Mapping[str, str] = {
    "use_vllm": "vLLM samples instead of the engine, with the strategies' options per row (docs/vllm.md)",
    "use_transformers_continuous_batching": "transformers samples instead of the engine",
    "generation_kwargs": (
        "temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens, do_sample, eos_token_id and stop "
        "strings (stop_strings, or stop; without them those of the model's generation config) go to the engine; with "
        "any other key `model.generate` samples"
    ),
    "router_aux_loss_coef": "the router's loss counts the tokens of padded rows: TRL's padded pass is used",
    "fsdp": (
        "weights are sharded: the padded pass is used; "
        "FSDP2 gathers them while the engine samples, with FSDP1 `model.generate` samples"
    ),
    "fsdp_config": "like fsdp",
    "deepspeed": (
        "no change with ZeRO-1 and 2; ZeRO-3 gathers weights while the engine samples, and uses the padded pass"
    ),
    "parallelism_config": "weights are sharded: `model.generate` and the padded pass are used",
    "neftune_noise_alpha": (
        "its noise is scaled by the length of a row: the padded pass is used; the engine samples without it"
    ),
    "torch_compile": "the compiled model is used: the padded pass",
    "torch_compile_backend": "like torch_compile",
    "torch_compile_mode": "like torch_compile",
    "use_liger_kernel": "Liger's layers are kept; fast passes are used if they agree with them",
    "liger_kernel_config": "like use_liger_kernel",
}

IRRELEVANT: Mapping[str, str] = {
    "cache_implementation": "the engine has its own cache; honoured with engine='generate'",
    "transformers_continuous_batching_config": "read with use_transformers_continuous_batching alone",
    "ds3_gather_for_generation": "read with DeepSpeed ZeRO-3 alone",
    "vllm_mode": "read with use_vllm alone",
    "vllm_model_impl": "read with use_vllm alone",
    "vllm_enable_sleep_mode": "read with use_vllm alone",
    "vllm_structured_outputs_regex": "read with use_vllm alone",
    "vllm_server_base_url": "read with use_vllm alone",
    "vllm_server_host": "read with use_vllm alone",
    "vllm_server_port": "read with use_vllm alone",
    "vllm_server_timeout": "read with use_vllm alone",
    "vllm_group_port": "read with use_vllm alone",
    "vllm_gpu_memory_utilization": "read with use_vllm alone",
    "vllm_max_model_length": "read with use_vllm alone",
    "vllm_tensor_parallel_size": "read with use_vllm alone",
    "vllm_importance_sampling_correction": "read with use_vllm alone; see the strategy importance_correction",
    "vllm_importance_sampling_mode": "read with use_vllm alone",
    "vllm_importance_sampling_clip_max": "read with use_vllm alone",
    "vllm_importance_sampling_clip_min": "read with use_vllm alone",
    "vllm_importance_sampling_cap": "TRL's old name of vllm_importance_sampling_clip_max",
    "use_transformers_paged": "TRL's old name of use_transformers_continuous_batching",
    "auto_find_batch_size": "TRL rejects it: a smaller batch would split groups",
    "label_names": "GRPO has no labels",
    "label_smoothing_factor": "GRPO has no labels",
    "include_for_metrics": "GRPO computes no metrics from predictions",
    "batch_eval_metrics": "GRPO computes no metrics from predictions",
    "eval_do_concat_batches": "GRPO computes no metrics from predictions",
    "eval_use_gather_object": "GRPO computes no metrics from predictions",
    "prediction_loss_only": "GRPO computes no metrics from predictions",
    "length_column_name": "GRPO samples prompts in groups",
    "train_sampling_strategy": "GRPO samples prompts in groups",
    "average_tokens_across_devices": "GRPO scales its own losses",
    "do_predict": "read by scripts alone",
    "do_train": "read by scripts alone",
    "do_eval": "read by scripts alone",
    "use_cache": "training keeps no cache",
    "local_rank": "set by the launcher",
}

_HONOURED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
    adam_epsilon beta bf16 bf16_full_eval cast_lm_head_to_fp32 chat_template_kwargs data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug delta
    disable_dropout disable_tqdm enable_jit_checkpoint entropy_coef entropy_coef_delta entropy_coef_max
    entropy_coef_min entropy_target epsilon epsilon_high eval_accumulation_steps eval_delay eval_on_start
    eval_steps eval_strategy fp16 fp16_full_eval full_determinism generation_batch_size
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    importance_sampling_level include_num_input_tokens_seen learning_rate load_best_model_at_end log_completions
    log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy loss_type lr_scheduler_kwargs
    lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
    max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs multi_objective_aggregation
    num_completions_to_print num_generations num_generations_eval num_iterations num_train_epochs
    off_policy_mask_threshold optim optim_args optim_target_modules output_dir pad_to_multiple_of
    per_device_eval_batch_size per_device_train_batch_size project push_to_hub ref_model_mixup_alpha
    ref_model_sync_steps remove_unused_columns repetition_penalty report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights run_name sapo_temperature_neg
    sapo_temperature_pos save_on_each_node save_only_model save_steps save_strategy save_total_limit
    scale_rewards seed shuffle_dataset skip_memory_metrics steps_per_generation sync_ref_model temperature tf32
    top_entropy_quantile top_k top_p torch_empty_cache_steps trackio_bucket_id trackio_space_id
    trackio_static_space_id trust_remote_code use_adaptive_entropy use_bias_correction_kl use_cpu vespo_k_neg
    vespo_k_pos vespo_lambda_neg vespo_lambda_pos warmup_steps weight_decay
"""
HONOURED: frozenset[str] = frozenset(_HONOURED.split())

REFUSED: Mapping[str, str] = {
    "a class that also derives from another trainer": (
        "if a method of that trainer would not be called, such as the loss of `GMPOTrainer` after ours"
    ),
    "a strategy that acts through a method which a subclass replaces": (
        "a `_compute_loss`, `_generate` or `_generate_and_score_completions` has to call `super()`'s; a custom loss "
        "gets only the strategies' advantages, one per token"
    ),
    "a data set without prompts, or with fewer than a generation batch takes": "no step would be trained",
    "prompts in messages, with a tokenizer that has no chat template": "they cannot be converted to text",
    "a strategy that sets sampling per row, with `generate`": (
        "it samples all rows with the same options; the engine and vLLM do not"
    ),
    "with vLLM and such a strategy": (
        "branching completions, tools, images, `vllm_structured_outputs_regex`, and keys of `generation_kwargs` other "
        "than temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, stop and stop_token_ids"
    ),
    "a strategy that orders the prompts, with a stream": "it would have to be read to its end",
    "`dynamic_sampling` or `skip_solved`, with a stream": "they take fresh prompts from anywhere in the data set",
    "`interpreter`, with tools, environments, a `rollout_func` or without the engine": (
        "calls in text are executed while the engine samples"
    ),
    "`dynamic_sampling`, with tools, environments, a `rollout_func`, images or vLLM": (
        "completions of fresh prompts could not be combined with the others, or it is untested"
    ),
    "a strategy that changes rewards, with multi_objective_aggregation='normalize_then_sum'": (
        "each reward is normalised separately, before there is a total to change"
    ),
}
"""What is refused at construction; no option of TRL is refused by itself."""
