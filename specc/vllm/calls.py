"""Arguments and methods of `LLM` and `AsyncLLM` that vLLM has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from specc.vllm.answers import Answer, Ignored, Unsupported

_NO_ADAPTER = Unsupported("the weights that were compiled", "merge the adapter, and compile")
_COMPILED_ADAPTER = Unsupported(
    "an adapter that was compiled in: specc compile --lora NAME=DIR",
    "compile it in, and pass lora_request, or lora of SamplingParams",
)
_OF_CHATS = Unsupported("messages", "pass it to chat", (None, False, "auto"))
_POOLING = Unsupported(
    "an engine that generates: it has no embeddings, classes or scores of texts",
    "use another program; log probabilities of a text are prompt_logprobs of SamplingParams",
)
_WORKERS = Unsupported(
    "graphs that are compiled: there is no Python model in a worker to call",
    "change the model before it is compiled",
)
_PROFILE = Unsupported("specc bench, which times each part of a step", "run specc bench ENGINE")
# of generate, chat and stream
ARGUMENTS: Mapping[str, Answer] = {
    "prompt_adapter_request": _NO_ADAPTER,
    "guided_options_request": Unsupported(
        "structured_outputs of SamplingParams",
        "pass SamplingParams(structured_outputs=StructuredOutputsParams(…))",
    ),
    "tokenization_kwargs": Unsupported(
        "text as the engine tokenizes it", "pass token ids", (None, {})
    ),
    "mm_processor_kwargs": Unsupported("text or token ids", "leave it out", (None, {})),
    "reasoning_ended": Ignored(),
    "trace_headers": Ignored("there are no traces", (None, {})),
    "data_parallel_rank": Unsupported("one engine, without replicas", "leave it out", (None, 0)),
    "prompt_text": Unsupported("prompt", "pass the text as prompt"),
    "tools": Unsupported("messages", "pass both to chat", (None, [])),
    "chat_template": _OF_CHATS,
    "chat_template_content_format": _OF_CHATS,
    "add_generation_prompt": _OF_CHATS,
    "continue_final_message": _OF_CHATS,
    "chat_template_kwargs": _OF_CHATS,
}
# of both classes
METHODS: Mapping[str, Unsupported] = {
    "beam_search": Unsupported(
        "greedy decoding or sampling: a beam search keeps other outputs than the target's own",
        "use generate; n gives several outputs of one prompt",
    ),
    "encode": _POOLING,
    "embed": _POOLING,
    "classify": _POOLING,
    "reward": _POOLING,
    "score": _POOLING,
    "collective_rpc": _WORKERS,
    "apply_model": _WORKERS,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "set_tokenizer": Unsupported(
        "the tokenizer that was compiled with the target", "compile with another tokenizer"
    ),
    "add_lora": _COMPILED_ADAPTER,
    "reset_prefix_cache": Unsupported(
        "rows of earlier prompts, which change no output",
        "load the engine with enable_prefix_caching=False to measure without them",
    ),
}
# names to import, of `specc` and of its modules that are called as vLLM's
NAMES: Mapping[str, str] = {
    "BeamSearchParams": "specc has no beam search, which keeps other outputs than the target's own:"
    " use SamplingParams, whose n gives several outputs",
    "LLMEngine": "specc has no engine that is driven step by step: use LLM.stream, or AsyncLLM",
    **dict.fromkeys(
        (
            "PoolingParams",
            "PoolingOutput",
            "PoolingRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        "engines of specc generate: they have no embeddings, classes or scores",
    ),
    "ModelRegistry": "models are compiled: specc.compile takes a module",
    "BeamSearchOutput": "specc has no beam search: n of SamplingParams gives several outputs",
}


def refuse_name(module: str, name: str) -> NoReturn:
    """Say why a module has not got a name.

    Raises:
        ImportError: the name is one of vLLM's.
        AttributeError: it is not.
    """
    if (why := NAMES.get(name)) is not None:
        raise ImportError(f"no {name} in {module}: {why}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
