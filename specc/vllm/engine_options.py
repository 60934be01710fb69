"""Options of engines that vLLM has: of its constructors and of its `EngineArgs`."""

from __future__ import annotations

from collections.abc import Mapping

from specc.vllm.answers import Answer, Ignored, Renamed, Unsupported

_LOADED = Unsupported(
    "an engine directory, which holds all that was read at compile",
    "leave it out; pass it to specc compile, where it applies",
)
_AT_COMPILE = "leave it out, or compile the engine again with --{}"
_NO_ADAPTERS = Unsupported(
    "the weights that were compiled", "merge the adapter, and compile", (None, False)
)
_NO_EMBEDDINGS = Unsupported(
    "an engine that generates", "leave it out; use another program for this", (None, False)
)
_CACHE = (
    "caches have room for max_num_seqs sequences, or for kv_cache_tokens rows in all, and take no"
    " other memory"
)
_CAPTURED = "steps are captured as the engine was compiled"
_LOADING = "an engine is a directory of its own, whose files are mapped or read"
_TEXT = "engines read text and token ids, no images"
_RANKS = "an engine starts its ranks by itself"
_LOG = Ignored()
ENGINE: Mapping[str, Answer] = {
    # other names of options that there are
    "model": Renamed("engine"),
    "enable_prefix_caching": Renamed("shares_prefixes"),
    # memory, and how work is cut: outputs are the same
    "gpu_memory_utilization": Ignored(_CACHE),
    "kv_cache_memory_bytes": Ignored(_CACHE),
    "num_gpu_blocks_override": Ignored(_CACHE),
    "block_size": Ignored("blocks are as the engine was compiled (--block-size)"),
    "swap_space": Ignored("rows that give way are computed again", (None, 0)),
    "cpu_offload_gb": Ignored("offload_weights says how much of the weights stays", (None, 0)),
    "kv_offloading_size": Ignored("rows that give way are computed again"),
    "kv_offloading_backend": Ignored("rows that give way are computed again"),
    "max_num_batched_tokens": Ignored("passes are as large as --prefill-chunk was at compile"),
    "enable_chunked_prefill": Ignored("all prompts are read in chunks", (None, True)),
    "max_num_partial_prefills": Ignored("all prompts are read in chunks", (None, 1)),
    "max_long_partial_prefills": Ignored("all prompts are read in chunks", (None, 1)),
    "long_prefill_token_threshold": Ignored("all prompts are read in chunks", (None, 0)),
    "disable_chunked_mm_input": Ignored(_TEXT),
    "num_scheduler_steps": Ignored("multi_step_ms says how long steps run in a row", (None, 1)),
    "multi_step_stream_outputs": Ignored(),
    "num_lookahead_slots": Ignored("a plan says how far ahead it drafts", (None, 0)),
    "scheduler_delay_factor": Ignored("requests are admitted at once", (None, 0)),
    "preemption_mode": Ignored("rows that give way are computed again", (None, "recompute")),
    "async_scheduling": Ignored("the scheduler is as the backend has it"),
    "disable_hybrid_kv_cache_manager": Ignored("caches are as the engine was compiled"),
    "prefix_caching_hash_algo": Ignored("blocks are found by their tokens"),
    "disable_cascade_attn": Ignored("kernels are those of the engine"),
    "attention_backend": Ignored("kernels are those of the engine"),
    "attention_config": Ignored("kernels are those of the engine"),
    "compilation_config": Ignored("an engine is compiled", (None, {}, 0)),
    "optimization_level": Ignored("an engine is compiled"),
    "max_seq_len_to_capture": Ignored(_CAPTURED),
    "cuda_graph_sizes": Ignored(_CAPTURED, (None, [])),
    "cudagraph_capture_sizes": Ignored(_CAPTURED, (None, [])),
    "max_cudagraph_capture_size": Ignored(_CAPTURED),
    "enforce_eager": Ignored("steps are captured or compiled as the engine's backend has it"),
    "disable_custom_all_reduce": Ignored(),
    "use_v2_block_manager": Ignored(),
    "enable_sleep_mode": Ignored("engines may sleep without it"),
    # how weights, tokenizers and processes come about
    "load_format": Ignored(_LOADING, (None, "auto")),
    "download_dir": Ignored(_LOADING),
    "safetensors_load_strategy": Ignored(_LOADING, (None, "lazy")),
    "model_loader_extra_config": Ignored(_LOADING, (None, {})),
    "ignore_patterns": Ignored(_LOADING, (None, [])),
    "max_parallel_loading_workers": Ignored(_LOADING),
    "pt_load_map_location": Ignored(_LOADING, (None, "cpu")),
    "use_tqdm_on_load": Ignored(),
    "hf_token": Ignored("an engine is a directory on this machine"),
    "model_impl": Ignored("an engine holds its own graphs", (None, "auto")),
    "config_format": Ignored(_LOADING, (None, "auto")),
    "tokenizer_mode": Ignored("texts are read by tokenizer.json", (None, "auto", "fast", "hf")),
    "tokenizer_pool_size": Ignored("texts are read by tokenizer.json", (None, 0)),
    "distributed_executor_backend": Ignored(_RANKS, (None, "uni", "mp")),
    "worker_use_ray": Ignored(_RANKS),
    "ray_workers_use_nsight": Ignored(_RANKS),
    "engine_use_ray": Ignored(_RANKS),
    "worker_cls": Ignored(_RANKS, (None, "auto")),
    "worker_extension_cls": Ignored(_RANKS, (None, "")),
    "scheduler_cls": Unsupported("the scheduler of this package", "leave it out"),
    "scheduling_policy": Ignored(
        "priorities always count, and requests without any come in their order",
        (None, "priority", "fcfs"),
    ),
    # these permit, tell or measure
    "trust_remote_code": _LOG,
    "disable_log_stats": _LOG,
    "disable_log_requests": _LOG,
    "enable_log_requests": _LOG,
    "aggregate_engine_logging": _LOG,
    "max_log_len": _LOG,
    "served_model_name": _LOG,
    "otlp_traces_endpoint": Ignored("there are no traces; metrics are at /metrics"),
    "collect_detailed_traces": Ignored("there are no traces; metrics are at /metrics"),
    "show_hidden_metrics_for_version": _LOG,
    "guided_decoding_backend": _LOG,
    "reasoning_parser": Ignored("specc serve has --reasoning-parser, Python read_message"),
    "additional_config": Ignored("there are no plugins", (None, {})),
    # of other models than those of text
    "limit_mm_per_prompt": Ignored(_TEXT, (None, {})),
    "mm_processor_kwargs": Ignored(_TEXT, (None, {})),
    "mm_processor_cache_gb": Ignored(_TEXT),
    "disable_mm_preprocessor_cache": Ignored(),
    "interleave_mm_strings": Ignored(),
    "skip_mm_profiling": Ignored(),
    "media_io_kwargs": Ignored(_TEXT, (None, {})),
    "allowed_local_media_path": Ignored(_TEXT, (None, "")),
    "allowed_media_domains": Ignored(_TEXT, (None, [])),
    "language_model_only": Ignored(),
    # these would change outputs, or ask for what is not there
    "data_parallel_size": Unsupported(
        "1: replicas are processes of their own", "leave it out, and start several", (None, 1)
    ),
    "enable_expert_parallel": Unsupported(
        "experts as the engine was compiled", "leave it out", (None, False)
    ),
    "kv_cache_dtype": Unsupported(
        "a cache as the engine was compiled for (auto, int8 or fp8)",
        _AT_COMPILE.format("kv-cache-dtype"),
        (None, "auto"),
    ),
    "quantization": Unsupported(
        "weights as the engine was compiled with", _AT_COMPILE.format("quantize")
    ),
    "tokenizer": Unsupported(
        "the tokenizer that was compiled with the target",
        "leave it out, or compile a target directory that holds this tokenizer",
    ),
    "skip_tokenizer_init": Unsupported(
        "the engine's tokenizer, if it has one", "leave it out and pass token ids", (None, False)
    ),
    "revision": _LOADED,
    "code_revision": _LOADED,
    "tokenizer_revision": _LOADED,
    "hf_overrides": _LOADED,
    "hf_config_path": _LOADED,
    "rope_scaling": _LOADED,
    "rope_theta": _LOADED,
    "disable_sliding_window": Unsupported(
        "attention as the model has it", "leave it out", (None, False)
    ),
    "speculative_config": Unsupported(
        "a plan of the engine", "pass plan, or compile with --draft and --num-speculative-tokens"
    ),
    "speculative_model": Unsupported(
        "a draft that the engine was compiled with", "compile with --draft"
    ),
    "num_speculative_tokens": Unsupported(
        "a plan of the engine", "pass plan, or compile with --num-speculative-tokens"
    ),
    "enable_lora": _NO_ADAPTERS,
    "lora_modules": _NO_ADAPTERS,
    "max_loras": _NO_ADAPTERS,
    "max_lora_rank": _NO_ADAPTERS,
    "enable_prompt_adapter": _NO_ADAPTERS,
    "enable_prompt_embeds": _NO_EMBEDDINGS,
    "logits_processors": Unsupported(
        "options of SamplingParams, which the engine itself applies", "leave it out", (None, [])
    ),
    "task": Unsupported("generate", "leave it out", (None, "auto", "generate")),
    "runner": Unsupported("generate", "leave it out", (None, "auto", "generate")),
    "convert": Unsupported("generate", "leave it out", (None, "auto", "none")),
    "pooler_config": _NO_EMBEDDINGS,
    "override_pooler_config": _NO_EMBEDDINGS,
    "kv_transfer_config": Unsupported("rows that an engine computes itself", "leave it out"),
    "kv_events_config": Unsupported("no events; metrics are at /metrics", "leave it out"),
    "device": Unsupported(
        "the device that the engine was compiled for", "pass backend", (None, "auto")
    ),
    "chat_template": Unsupported("a template for each chat", "pass chat_template to chat"),
    # of llama.cpp and transformers
    "n_gpu_layers": Unsupported("the device that the engine was compiled for", "pass backend"),
    "n_ctx": Unsupported("max_model_len, as it is called here", "pass max_model_len", ()),
    "torch_dtype": Unsupported("dtype, as it is called here", "pass dtype", ()),
    "device_map": Unsupported(
        "devices as the engine was compiled for", "leave it out", (None, "auto")
    ),
}
