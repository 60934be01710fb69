"""What vLLM's users pass to the constructor: taken where it means something, else answered."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specc.artifact.manifest import ON_GPU
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.sampling.vllm_names import Answer, answer_names

_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
_DTYPES |= {"fp32": "float32"}
_ONE_DEVICE = Answer("1: an engine runs on one device", "leave it out", (None, 1))
_LOADED = Answer(
    "an engine directory, which holds all that was read at compile",
    "leave it out; pass it to specc compile, where it applies",
)
_AT_COMPILE = "compile the engine again with --{}"
_NO_CHANGE = Answer("", "", (...,))
# options that need no loaded engine to be answered
_ANSWERS: Mapping[str, Answer] = {
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": Answer("one device", "leave it out", (None, False)),
    "distributed_executor_backend": Answer("one device", "leave it out", (None, "uni")),
    "worker_use_ray": Answer("one device", "leave it out", (None, False)),
    "gpu_memory_utilization": Answer(
        "caches of max_num_seqs sequences, or of kv_cache_tokens rows in all",
        "leave it out, or pass kv_cache_tokens",
    ),
    "num_gpu_blocks_override": Answer(
        "the rows of the cache", "pass kv_cache_tokens, which counts tokens"
    ),
    "swap_space": Answer("rows that are computed again", "leave it out", (None, 0)),
    "cpu_offload_gb": Answer("weights on one device", "leave it out", (None, 0)),
    "kv_cache_dtype": Answer(
        "a cache of the models' dtype", _AT_COMPILE.format("dtype"), (None, "auto")
    ),
    "block_size": Answer("blocks as the engine was compiled for", _AT_COMPILE.format("block-size")),
    "max_num_batched_tokens": Answer(
        "passes as large as the engine was compiled for", _AT_COMPILE.format("prefill-chunk")
    ),
    "enable_chunked_prefill": Answer(
        "prompts in chunks, which is how all are read", "leave it out", (None, True)
    ),
    "quantization": Answer(
        "weights of the dtype that they were compiled with",
        "leave it out, or compile a checkpoint of another dtype: --dtype",
    ),
    "load_format": Answer("an engine directory", "leave it out", (None, "auto")),
    "tokenizer": Answer(
        "the tokenizer that was compiled with the target",
        "leave it out, or compile a target directory that holds this tokenizer",
    ),
    "tokenizer_mode": Answer("tokenizer.json", "leave it out", (None, "auto", "fast")),
    "skip_tokenizer_init": Answer(
        "the engine's tokenizer, if it has one", "leave it out and pass token ids", (None, False)
    ),
    "revision": _LOADED,
    "code_revision": _LOADED,
    "tokenizer_revision": _LOADED,
    "download_dir": _LOADED,
    "hf_token": _LOADED,
    "hf_overrides": _LOADED,
    "hf_config_path": _LOADED,
    "speculative_config": Answer(
        "a plan of the engine", "pass plan, or compile with --draft and --num-speculative-tokens"
    ),
    "speculative_model": Answer(
        "a draft that the engine was compiled with", "compile with --draft"
    ),
    "num_speculative_tokens": Answer(
        "a plan of the engine", "pass plan, or compile with --num-speculative-tokens"
    ),
    "enable_lora": Answer(
        "the weights that were compiled", "merge the adapter, and compile", (None, False)
    ),
    "max_loras": Answer("the weights that were compiled", "merge the adapter, and compile"),
    "limit_mm_per_prompt": Answer("text or token ids", "leave it out", (None, {})),
    "task": Answer("generate", "leave it out", (None, "auto", "generate")),
    "runner": Answer("generate", "leave it out", (None, "auto", "generate")),
    "device": Answer("the device that the engine was compiled for", "pass backend", (None, "auto")),
    "compilation_config": Answer("an engine that is compiled", "leave it out"),
    "max_seq_len_to_capture": Answer("steps that are captured at any length", "leave it out"),
    "generation_config": Answer("SamplingParams", "pass them", (None, "auto", "vllm")),
    "override_generation_config": Answer("SamplingParams", "pass them", (None, {})),
    "scheduling_policy": Answer(
        "priorities, which always count", "leave it out", (None, "priority")
    ),
    "chat_template": Answer("a template for each chat", "pass chat_template to chat"),
    # these permit, or tell, and change no output
    "trust_remote_code": _NO_CHANGE,
    "disable_log_stats": _NO_CHANGE,
    "disable_custom_all_reduce": _NO_CHANGE,
    "use_v2_block_manager": _NO_CHANGE,
    "guided_decoding_backend": _NO_CHANGE,
    "n_gpu_layers": Answer("the device that the engine was compiled for", "pass backend"),
    "n_ctx": Answer("max_model_len, as it is called here", "pass max_model_len", ()),
    "torch_dtype": Answer("dtype, as it is called here", "pass dtype", ()),
    "device_map": Answer("one device", "leave it out", (None, "auto")),
}
# options that are known beside those of `LLM` itself
_KNOWN = ("dtype", "enforce_eager", "max_logprobs")
_OWN = (
    *("engine", "plan", "max_num_seqs", "policy", "verify", "num_threads", "backend"),
    *("kv_cache_tokens", "shares_prefixes", "model", "seed", "max_model_len"),
    "enable_prefix_caching",
)


@dataclass(frozen=True)
class VllmOptions:
    """Options of vLLM's that mean something here, once they are checked.

    Args:
        dtype: of the target; anything else than the engine's is refused.
        enforce_eager: capture nothing, which is so on every host.
        max_logprobs: at most 20 in any case.
        max_model_len: tokens of prompt and output together.
    """

    dtype: Any = None
    enforce_eager: bool | None = None
    max_logprobs: int | None = None
    max_model_len: int | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], max_model_len: int | None) -> VllmOptions:
        """From what was passed by name.

        Raises:
            ConfigError: an option that there is not, with what to do about it.
        """
        known = answer_names(given, (*_KNOWN, *_OWN), _ANSWERS, ConfigError)
        return cls(**known, max_model_len=max_model_len)

    def check(self, engine: Engine) -> None:
        """Raises ConfigError: the engine is another one than these options ask for."""
        name = str(self.dtype).removeprefix("torch.")
        name = _DTYPES.get(name, name)
        own = engine.manifest.dtype if engine.manifest else name
        if self.dtype not in (None, "auto") and name != own:
            raise ConfigError(
                f"dtype={name}, and an engine of {own}",
                f"{own}, or auto",
                "leave dtype out, or compile the engine again with --dtype",
            )
        most = engine.max_seq_len
        length = self.max_model_len
        if length is not None and (type(length) is not int or not 2 <= length <= most):
            raise ConfigError(
                f"max_model_len={length!r}",
                f"2 … {most}, the engine's max_seq_len",
                "choose a number in this range, or compile with a larger --max-seq-len",
            )
        if self.enforce_eager and engine.backend in ON_GPU:
            raise ConfigError(
                f"enforce_eager=True, and an engine of the backend {engine.backend}",
                "steps that are captured: there is no other way to run them on a GPU here",
                'leave it out; backend="eager" runs any engine without compiled code, on the host',
            )
        if self.max_logprobs is not None and self.max_logprobs > 20:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs}", "at most 20", "lower it, or leave it out"
            )


class Seeds:
    """Seeds of requests that have none of their own, in the order in which they come.

    Args:
        seed: that all of them follow from; None leaves it to each request.
    Raises:
        ConfigError: it is no seed.
    """

    def __init__(self, seed: int | None) -> None:
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ConfigError(f"seed={seed!r}", "an integer, 0 or more, or None", "correct it")
        self._random = None if seed is None else random.Random(seed)

    def give(self, params: SamplingParams) -> SamplingParams:
        if self._random is None or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))


def engine_of(engine: str | Path | Engine | None, model: str | Path | Engine | None) -> Any:
    """The engine that was passed under either name.

    Raises:
        ConfigError: under both, or neither.
        EngineError: a checkpoint instead, or the name of one.
    """
    if (engine is None) == (model is None):
        raise ConfigError(
            "neither engine nor model" if engine is None else f"engine={engine}, model={model}",
            "one engine directory",
            'pass it alone, as in LLM("engine/")',
        )
    found = model if engine is None else engine
    if isinstance(found, Engine):
        return found
    if not isinstance(found, (str, Path)):
        raise ConfigError(
            f"an engine of type {type(found).__name__}",
            "an engine directory, or an Engine",
            "pass one of these",
        )
    path = Path(found)
    is_checkpoint = (path / "config.json").is_file() and not (path / "manifest.json").is_file()
    if is_checkpoint or (not path.exists() and _is_hub_id(str(found))):
        command = f"specc compile --target {found} --draft DRAFT -o engine/"
        raise EngineError(
            f"{found}, {'a Hugging Face checkpoint' if is_checkpoint else 'which does not exist'}",
            "an engine directory, which specc compile writes",
            f"compile it first: {command}"
            if is_checkpoint
            else f"correct the path; a model of the hub is compiled first: {command}",
        )
    return found


def _is_hub_id(name: str) -> bool:
    """`owner/name`, as models of the hub are called."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")
