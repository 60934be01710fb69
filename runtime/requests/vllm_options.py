"""What vLLM's users pass to the constructor: taken where it means something, else answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specc.errors import ConfigError
from specc.sampling.vllm_names import Unsupported, answer_names

_LOADED = Unsupported(
    "an engine directory, which holds all that was read at compile",
    "leave it out; pass it to specc compile, where it applies",
)
_AT_COMPILE = "leave it out, or compile the engine again with --{}"
_NO_CHANGE = Unsupported("", "", (...,))
# options that need no loaded engine to be answered
_ANSWERS: Mapping[str, Unsupported] = {
    "data_parallel_size": Unsupported(
        "1: replicas are processes of their own", "leave it out, and start several", (None, 1)
    ),
    "enable_expert_parallel": Unsupported(
        "experts as the engine was compiled", "leave it out", (None, False)
    ),
    "distributed_executor_backend": Unsupported(
        "ranks that the engine starts by itself", "leave it out", (None, "uni")
    ),
    "worker_use_ray": Unsupported(
        "ranks that the engine starts by itself", "leave it out", (None, False)
    ),
    "gpu_memory_utilization": Unsupported(
        "caches of max_num_seqs sequences, or of kv_cache_tokens rows in all",
        "leave it out, or pass kv_cache_tokens",
    ),
    "num_gpu_blocks_override": Unsupported(
        "the rows of the cache", "pass kv_cache_tokens, which counts tokens"
    ),
    "swap_space": Unsupported("rows that are computed again", "leave it out", (None, 0)),
    "cpu_offload_gb": Unsupported(
        "offload_weights, which says what may stay", "pass offload_weights", (None, 0)
    ),
    "kv_cache_dtype": Unsupported(
        "a cache as the engine was compiled for (auto or int8)",
        _AT_COMPILE.format("kv-cache-dtype"),
        (None, "auto"),
    ),
    "block_size": Unsupported(
        "blocks as the engine was compiled for", _AT_COMPILE.format("block-size")
    ),
    "max_num_batched_tokens": Unsupported(
        "passes as large as the engine was compiled for", _AT_COMPILE.format("prefill-chunk")
    ),
    "enable_chunked_prefill": Unsupported(
        "prompts in chunks, which is how all are read", "leave it out", (None, True)
    ),
    "quantization": Unsupported(
        "weights as the engine was compiled with", _AT_COMPILE.format("quantize")
    ),
    "load_format": Unsupported("an engine directory", "leave it out", (None, "auto")),
    "tokenizer": Unsupported(
        "the tokenizer that was compiled with the target",
        "leave it out, or compile a target directory that holds this tokenizer",
    ),
    "tokenizer_mode": Unsupported("tokenizer.json", "leave it out", (None, "auto", "fast")),
    "skip_tokenizer_init": Unsupported(
        "the engine's tokenizer, if it has one", "leave it out and pass token ids", (None, False)
    ),
    "revision": _LOADED,
    "code_revision": _LOADED,
    "tokenizer_revision": _LOADED,
    "download_dir": _LOADED,
    "hf_token": _LOADED,
    "hf_overrides": _LOADED,
    "hf_config_path": _LOADED,
    "speculative_config": Unsupported(
        "a plan of the engine", "pass plan, or compile with --draft and --num-speculative-tokens"
    ),
    "speculative_model": Unsupported(
        "a draft that the engine was compiled with", "compile with --draft"
    ),
    "num_speculative_tokens": Unsupported(
        "a plan of the engine", "pass plan, or compile with --num-speculative-tokens"
    ),
    "enable_lora": Unsupported(
        "the weights that were compiled", "merge the adapter, and compile", (None, False)
    ),
    "max_loras": Unsupported("the weights that were compiled", "merge the adapter, and compile"),
    "limit_mm_per_prompt": Unsupported("text or token ids", "leave it out", (None, {})),
    "task": Unsupported("generate", "leave it out", (None, "auto", "generate")),
    "runner": Unsupported("generate", "leave it out", (None, "auto", "generate")),
    "device": Unsupported(
        "the device that the engine was compiled for", "pass backend", (None, "auto")
    ),
    "compilation_config": Unsupported("an engine that is compiled", "leave it out"),
    "max_seq_len_to_capture": Unsupported("steps that are captured at any length", "leave it out"),
    "scheduling_policy": Unsupported(
        "priorities, which always count", "leave it out", (None, "priority")
    ),
    "chat_template": Unsupported("a template for each chat", "pass chat_template to chat"),
    # these permit, or tell, and change no output
    "trust_remote_code": _NO_CHANGE,
    "disable_log_stats": _NO_CHANGE,
    "disable_custom_all_reduce": _NO_CHANGE,
    "use_v2_block_manager": _NO_CHANGE,
    "guided_decoding_backend": _NO_CHANGE,
    "n_gpu_layers": Unsupported("the device that the engine was compiled for", "pass backend"),
    "n_ctx": Unsupported("max_model_len, as it is called here", "pass max_model_len", ()),
    "torch_dtype": Unsupported("dtype, as it is called here", "pass dtype", ()),
    "device_map": Unsupported(
        "devices as the engine was compiled for", "leave it out", (None, "auto")
    ),
}
# fields of `EngineArgs` that vLLM has not got, and vLLM's names of two others
_INTERNAL = ("capture",)
_ALIASES = ("model", "enable_prefix_caching")


def answer_options(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options that mean something here, vLLM's own names among them.

    Args:
        given: name → value.
        known: fields of `EngineArgs`.
    Raises:
        ConfigError: an option that there is not, with what to do about it.
    """
    names = [name for name in (*known, *_ALIASES) if name not in _INTERNAL]
    return answer_names(given, names, _ANSWERS, ConfigError)
