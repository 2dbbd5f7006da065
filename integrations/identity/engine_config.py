"""What an engine's configuration adds to the identity of its caches: every option, except those that cannot matter, and
its environment variables (`engine_environment`).

    configuration ──> fields that differ from their defaults ──> without those listed ──> JSON, in `name_of_weights`

An option that this version does not know belongs to the identity as soon as it is set. Defaults are left out: a plain
engine then has the identity of its checkpoint, and a newer engine finds what an older one stored.

An option is listed, with its reason, if it cannot change what is computed for a token, apart from rounding: kernels,
compilation, ranks and batches change the order of sums, and entries are shared among all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.integrations.identity.checkpoint import (
    checkpoint_identity,
    code_identity,
    configuration_identity,
    file_identity,
    refuse_other_copies,
)
from cuvee.integrations.identity.engine_environment import sglang_environment, vllm_environment
from cuvee.integrations.identity.option_values import (
    LEFT_OUT,
    UnstableError,
    canonical_text,
    fields_of,
    is_record,
    plain_json,
)
from cuvee.integrations.stores.redaction import redacted

Listed = Mapping[str, Mapping[str, str]]  # by class, the fields that are left out, by the reason
Readers = Mapping[str, Callable[[Any], Any]]  # by "Class.field", what stands for its value; LEFT_OUT: nothing


# Entries of `model_loader_extra_config` that only change how the same weights are read. The others name other weights,
# or change them; they count by a digest, since some hold credentials.
_LOADER: Mapping[str, str] = {
    "how fast the same files are read": (
        "concurrency memory_limit distributed num_readers enable_multithread_load num_threads max_num_threads "
        "verify_hash"
    ),
    "credentials, and where they are valid": (
        "s3_access_key_id s3_secret_access_key s3_endpoint stream_kwargs encryption_keyfile"
    ),
    "the same entries": "tensorizer_config",  # and entries below it
}
_OF_SAFETENSORS = ("auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy")  # dummy is named by its seed

VLLM: Listed = {
    "VllmConfig": {
        "which tokens are computed when, and in which batch": "scheduler_config performance_mode shutdown_timeout",
        "where and how the same function is computed": (
            "compilation_config device_config offload_config optimization_level"
        ),
        "what is told about requests, not what they compute": (
            "observability_config logging_config profiler_config kv_events_config aux_output_config instance_id"
        ),
        "tokens are in the key, however they were chosen": (
            "structured_outputs_config reasoning_config watermark_config speculative_config"
        ),
        "who moves caches, encoder outputs and weights": (
            "kv_transfer_config ec_transfer_config ec_manager_config weight_transfer_config"
        ),
        "made from the checkpoint's files and ModelConfig.quantization": "quant_config",
    },
    "ModelConfig": {
        "the content of the checkpoint's files is in the key": (
            "model model_weights revision hf_config hf_text_config word_embeddings_untied_by_checkpoint"
        ),
        "named beside the options": "dtype",
        "named for weights that are in no file": "seed",
        "the tokenizer's files and the tokens are in the key": (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin renderer_num_workers"
        ),
        "the engine's limits, and the names that it goes by": (
            "spec_target_max_model_len max_logprobs served_model_name hf_token allowed_local_media_path "
            "allowed_media_domains"
        ),
        "how tokens are chosen and told": (
            "logprobs_mode logits_processors use_fp64_gumbel return_sampling_mask enable_trace_replay "
            "generation_config override_generation_config"
        ),
        "how the same function is computed": "enforce_eager disable_cascade_attn",
        "requests that give embeddings are not cached": "enable_prompt_embeds",
        "the memory of weights while the engine sleeps": (
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator"
        ),
    },
    "MultiModalConfig": {
        "limits and caches of the processor, and how its data travels": (
            "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_tensor_ipc mm_ipc_gpu_memory_gb skip_mm_profiling"
        ),
        "images are named by what the encoder gets": "mm_hasher_algorithm",
        "where and how the same function is computed": "mm_encoder_tp_mode mm_encoder_attn_backend",
        "written, not read": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        "the tokens are in the key": "interleave_mm_strings",
    },
    "LoRAConfig": {
        "limits of the engine": "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
        "where and how the same function is computed": "fully_sharded_loras specialize_active_lora",
        "a request that they serve names its adapter": "default_mm_loras",
    },
    "CacheConfig": {
        "the cache's dtype is in the layout": "cache_dtype",
        "the engine's pages, and how many there are": (
            "block_size user_specified_block_size kv_cache_layout prefix_match_unit gpu_memory_utilization "
            "num_gpu_blocks_override num_gpu_blocks num_cpu_blocks effective_attention_block_size kv_cache_size_tokens "
            "kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend skip_page_size_padded _block_size_resolved"
        ),
        "how the engine finds its pages": (
            "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval"
        ),
        "read from the checkpoint": "is_attention_free sliding_window",
        "the shapes and dtypes of states that the engine makes of them are in the key": (
            "mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
            "enable_mamba_shared_prefix_checkpoint"
        ),
    },
    "ParallelConfig": {
        "the number of shards is in the key": "tensor_parallel_size",
        "refused, or of ranks that share nothing": (
            "prefill_context_parallel_size decode_context_parallel_size "
            "dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size "
            "_allow_auto_resolve_cp_interleave_size"
        ),
        "ranks, addresses, ports and processes": (
            "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_index data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
            "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval world_size rank "
            "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank master_addr "
            "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds distributed_executor_backend placement_group "
            "ray_runtime_env ray_workers_use_nsight max_parallel_loading_workers"
        ),
        "where and how the same function is computed": (
            "is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter "
            "enable_eplb eplb_config expert_placement_strategy all2all_backend disable_custom_all_reduce "
            "enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
            "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization"
        ),
        "what the engine does when a rank fails": "enable_fault_tolerance fault_tolerance_config",
    },
    "LoadConfig": {
        "how the same files are read": (
            "download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
            "device use_tqdm_on_load pt_load_map_location"
        ),
    },
    "AttentionConfig": {
        "how the same function is computed": (
            "backend backend_per_kind minimax_m3_msa_decode_backend flash_attn_version use_trtllm_attention "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
            "mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
            "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size"
        ),
    },
    "KernelConfig": {
        "how the same function is computed": (
            "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
            "enable_jit_warmup sparse_indexer_topk_backend"
        ),
    },
}  # fmt: skip

SGLANG: Listed = {
    "ServerArgs": {
        "the content of the checkpoint's files is in the key": "model_path revision download_dir model_checksum",
        "the tokens are in the key": (
            "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num "
            "skip_tokenizer_init chat_template trust_request_chat_template hf_chat_template_name "
            "completion_template default_chat_template_kwargs allow_auto_truncate enable_dynamic_batch_tokenizer "
            "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
            "disable_tokenizer_batch_decode"
        ),
        "addresses, names and secrets of the server": (
            "host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port "
            "grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups "
            "enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile "
            "ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name "
            "file_storage_path tool_server enable_response_store allowed_media_domains media_url_max_file_size_mb"
        ),
        "how tokens are chosen and told": (
            "enable_cache_report return_input_ids return_output_ids reasoning_parser strip_thinking_cache "
            "enable_strict_thinking tool_call_parser sampling_defaults preferred_sampling_params stream_interval "
            "batch_notify_size stream_response_default_include_usage incremental_streaming_output "
            "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
            "constrained_json_max_whitespace_cnt sampling_backend grammar_backend enable_custom_logit_processor "
            "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
            "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all "
            "enable_return_hidden_states return_hidden_states_mode sampling_mask_max_tokens "
            "disable_outlines_disk_cache enable_fp32_lm_head"
        ),
        "ranks, ports and processes": (
            "device base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray numa_node "
            "custom_sigquit_handler gc_threshold nccl_port dist_timeout dist_init_addr gated_launch_port nnodes "
            "node_rank tp_size pp_size dp_size attn_dp_size load_balance_method enable_dp_attention "
            "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all "
            "enable_p2p_check ep_size"
        ),
        "which tokens are computed when, and the engine's own pages": (
            "mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size "
            "enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy "
            "enable_priority_scheduling disable_priority_preemption default_priority_value "
            "abort_on_priority_when_disabled schedule_low_priority_values_first "
            "priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness page_size "
            "disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk "
            "radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config "
            "disable_radix_cache enable_session_radix_cache radix_cache_backend enable_hierarchical_cache "
            "hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy "
            "hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy "
            "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
            "hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker "
            "unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup "
            "disaggregation_mode disaggregation_bootstrap_port disaggregation_transfer_backend "
            "disaggregation_ib_device"
        ),
        "how the same function is computed, and from which copy of the files": (
            "attention_backend decode_attention_backend prefill_attention_backend disable_flashinfer_autotune "
            "flashinfer_autotune_skip_ops triton_attention_num_kv_splits triton_attention_split_tile_size "
            "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
            "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
            "cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
            "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph "
            "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs enable_layerwise_nvtx_marker "
            "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem "
            "pre_warm_nccl enable_deterministic_inference cpu_offload_gb enable_memory_saver enable_weights_cpu_backup "
            "weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
            "weight_loader_drop_cache_after_load mm_attention_backend"
        ),
        "limits, and workers of the processor": (
            "max_loaded_loras max_loras_per_batch max_lora_rank lora_eviction_policy enable_lora_overlap_loading "
            "lora_backend max_lora_chunk_size lora_drain_wait_threshold mm_processor_worker_num mm_io_worker_num "
            "mm_preprocess_cache_size_mb limit_mm_data_per_request enable_prefix_mm_cache "
            "enable_broadcast_mm_inputs_process mm_enable_dp_encoder mm_feature_transport"
        ),
        "what is told about requests, not what they compute": (
            "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
            "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port "
            "enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval "
            "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels "
            "bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
            "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
            "kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id "
            "forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name "
            "export_metrics_to_file export_metrics_to_file_dir stat_loggers"
        ),
    },
}  # fmt: skip


def vllm_options(vllm_config: Any, *, named: bool = False) -> dict[str, Any]:
    """Return the options of vLLM's `VllmConfig` that belong to an identity.

    Args and Raises as `set_options`.
    """
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    readers: Readers = {
        # The file that is read instead of the checkpoint's own.
        "ModelConfig.hf_config_path": partial(_other_config, model),
        "ModelConfig.code_revision": lambda name: name and _code(model, name),
        # A function is known by what it makes.
        "ModelConfig.hf_overrides": lambda value: {"made": model.hf_config} if callable(value) else value,
        "ModelConfig.max_model_len": partial(_length, model.hf_text_config),
        "MultiModalConfig.mm_encoder_fp8_scale_path": lambda path: path and file_identity(path),
        # "auto", as vLLM resolves it.
        "LoRAConfig.lora_dtype": lambda dtype: LEFT_OUT if dtype == model.dtype else dtype,
        "LoadConfig.load_format": lambda name: LEFT_OUT if str(name) in _OF_SAFETENSORS else str(name),
        "LoadConfig.model_loader_extra_config": _loader,
        "ParallelConfig.worker_cls": lambda name: LEFT_OUT if str(name).startswith("vllm.") else name,
    }
    options = set_options(vllm_config, VLLM, readers, named=named)
    options |= {"dummy": model.seed} if load_format.endswith("dummy") else {}
    if torch.version.hip and str(vllm_config.cache_config.cache_dtype) not in ("auto", "bfloat16", "float16"):
        from vllm.platforms import current_platform

        options |= {"fp8": str(current_platform.fp8_dtype())}  # which differs between devices under one name
    if not named:
        from vllm import envs

        features = {
            "download_dir": vllm_config.load_config.download_dir, "VLLM_USE_MODELSCOPE": envs.VLLM_USE_MODELSCOPE,
        }  # fmt: skip
        refuse_other_copies([model.model], features)
    environment = vllm_environment()
    return options | ({"environment": environment} if environment else {})


def sglang_options(server_args: Any, *, named: bool = False) -> dict[str, Any]:
    """Return the options of SGLang's `ServerArgs` that belong to an identity.

    SGLang tells which adapter a page is of by the adapter's name and path, so the content of those that it starts with
    is part of the identity.

    Args and Raises as `set_options`; UnsupportedModelError: SGLang names images by what clients call them.
    """
    if server_args.trust_mm_content_hashes:
        raise UnsupportedModelError(
            "cuvee does not support --trust-mm-content-hashes: a client could name one image after another"
        )
    dummy = server_args.load_format == "dummy"
    readers: Readers = {
        # The layout tells 16 bits from 32, but SGLang's pools hold all codes of 8 and 4 bits as bytes.
        "ServerArgs.kv_cache_dtype": lambda name: LEFT_OUT if name in ("auto", "bf16", "bfloat16") else name,
        "ServerArgs.random_seed": lambda seed: seed if dummy else LEFT_OUT,
        "ServerArgs.json_model_override_args": lambda text: json.loads(text or "{}") or LEFT_OUT,
        "ServerArgs.lora_paths": lambda paths: _adapters(paths) or LEFT_OUT,
        "ServerArgs.quantization_param_path": lambda path: path and file_identity(path),
        "ServerArgs.uno_lora_path": lambda path: path and checkpoint_identity(path),
        "ServerArgs.model_loader_extra_config": _loader_of_sglang,
    }
    environment = sglang_environment()
    options = set_options(server_args, SGLANG, readers, named=named)
    return options | ({"environment": environment} if environment else {})


def set_options(
    config: Any, listed: Listed, readers: Readers, *, named: bool = False, where: str = ""
) -> dict[str, Any]:
    """Return the options of a configuration that belong to an identity, by name, as JSON values.

    Args:
        config: a dataclass or a msgspec Struct, whose fields may be such, too.
        listed: fields to leave out.
        readers: give what is compared with a field's default instead of its value.
        named: the user named the model, and answers for values that processes write differently: they are left out.
        where: `config` in its parent, for messages.

    Raises:
        InputError: a value that processes write differently, such as a function; a path that leads nowhere.
    """
    kind = type(config).__name__
    left_out = {name for names in listed.get(kind, {}).values() for name in names.split()}
    options: dict[str, Any] = {}
    for name, default in fields_of(config):
        value, at = getattr(config, name, None), f"{where}{name}"
        if name in left_out:
            continue
        try:
            value = readers.get(f"{kind}.{name}", lambda value: value)(value)
            if value is LEFT_OUT:
                continue
            if is_record(value):
                inner = set_options(value, listed, readers, named=named, where=f"{at}.")
                options |= {name: inner} if inner else {}
                continue
            plain = plain_json(value)
            if default is LEFT_OUT or canonical_text(plain) != canonical_text(plain_json(default)):
                options[name] = plain
        except UnstableError as error:
            if not named:
                raise InputError(
                    f"{at}: must be a value that every process writes alike, got {error}: nothing that was "
                    "stored would be found again; set option 'model_id' to a name of your own that changes with it"
                ) from error
    return options


def _other_config(model: Any, path: str | None) -> Any:
    """Return the identity of a configuration that is read from another place than the checkpoint."""
    if path in (None, "", model.model):
        return LEFT_OUT
    return configuration_identity(str(path), revision=_config_revision(model))


def _code(model: Any, name: str) -> str:
    """Return the identity of the code of a commit, tag or branch, which vLLM has not resolved."""
    return code_identity(model.hf_config_path or model.model, _config_revision(model), name)


def _config_revision(model: Any) -> str | None:
    revision: str | None = getattr(model, "_hf_config_revision", None) or model.revision
    return revision


def _loader(given: Any) -> Any:
    """Return the entries of a loader's options that may change weights, each as a digest."""
    if is_record(given):
        given = {name: getattr(given, name) for name, _ in fields_of(given)}
    if not isinstance(given, Mapping):
        return LEFT_OUT if not given else _hashed(given)
    left_out = {name for names in _LOADER.values() for name in names.split()}
    found = {str(name): _hashed(value) for name, value in given.items() if name not in left_out and value is not None}
    inner: Any = _loader(given["tensorizer_config"]) if "tensorizer_config" in given else LEFT_OUT
    return found | ({} if inner is LEFT_OUT else inner) or LEFT_OUT


def _loader_of_sglang(given: Any) -> Any:
    """Return what `_loader` does for a JSON object, or its text."""
    return _loader(json.loads(given or "{}") if isinstance(given, str) else given)


def _hashed(value: Any) -> str:
    text = redacted(value) if isinstance(value, str) and "://" in value else canonical_text(plain_json(value))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _length(config: Any, most: int | None) -> Any:
    """Return the most tokens of a sequence where vLLM makes the model depend on them: LongRoPE, and Llama 4."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    depends = "longrope" in repr(rope) or str(getattr(config, "model_type", "")).startswith("llama4")
    return most if depends else LEFT_OUT


def _adapters(given: Any) -> list[list[str]]:
    """Return name and content of each adapter in SGLang's `--lora-paths`: `name=path`, a path, or an object with both.

    Paths by name are such, too.
    """
    if isinstance(given, Mapping):
        given = [f"{name}={path}" for name, path in given.items()]
    found = []
    for each in given or ():
        if isinstance(each, str):
            name, _, path = each.rpartition("=")
        else:
            fields = each if isinstance(each, Mapping) else {"lora_name": each.lora_name, "lora_path": each.lora_path}
            name, path = str(fields["lora_name"]), str(fields["lora_path"])
        found.append([name or path, checkpoint_identity(path)])
    return found
