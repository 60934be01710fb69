"""specc: compiler and runtime for lossless speculative decoding of large language models."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# in a checkout, passes, runtime and kernels lie beside this folder: imported from its root, it has
# those, whatever is installed
if __name__ == "specc" and not os.path.isdir(os.path.join(__path__[0], "runtime")):
    __path__.append(os.path.dirname(__path__[0]))

from specc.version import __version__ as __version__

if TYPE_CHECKING:
    from specc.api import compile as compile
    from specc.api import reshard as reshard
    from specc.config import CompileConfig as CompileConfig
    from specc.errors import SpeccError as SpeccError
    from specc.inputs import TextPrompt as TextPrompt
    from specc.inputs import TokensPrompt as TokensPrompt
    from specc.lora.request import LoRARequest as LoRARequest
    from specc.runtime.async_llm import AsyncLLM as AsyncLLM
    from specc.runtime.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from specc.runtime.engine import Engine as Engine
    from specc.runtime.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from specc.runtime.engine_args import EngineArgs as EngineArgs
    from specc.runtime.llm import LLM as LLM
    from specc.runtime.outputs.request_output import CompletionOutput as CompletionOutput
    from specc.runtime.outputs.request_output import RequestOutput as RequestOutput
    from specc.sampling.params import SamplingParams as SamplingParams
    from specc.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
    from specc.sampling_params import GuidedDecodingParams as GuidedDecodingParams
    from specc.server.parsers.whole_message import read_message as read_message
    from specc.speculation.tree import TokenTree as TokenTree

# lazy (PEP 562): specc is both the bottom and the top of the import graph, and a deployed engine
# must not import the compiler
_EXPORTS = {
    "compile": "specc.api",
    "reshard": "specc.api",
    "CompileConfig": "specc.config",
    "SamplingParams": "specc.sampling.params",
    "SpeccError": "specc.errors",
    "StructuredOutputsParams": "specc.sampling.structured",
    "GuidedDecodingParams": "specc.sampling_params",
    "TextPrompt": "specc.inputs",
    "TokensPrompt": "specc.inputs",
    "LoRARequest": "specc.lora.request",
    "AsyncLLM": "specc.runtime.async_llm",
    "AsyncLLMEngine": "specc.runtime.async_llm",
    "CompletionOutput": "specc.runtime.outputs.request_output",
    "RequestOutput": "specc.runtime.outputs.request_output",
    "Engine": "specc.runtime.engine",
    "AsyncEngineArgs": "specc.runtime.engine_args",
    "EngineArgs": "specc.runtime.engine_args",
    "LLM": "specc.runtime.llm",
    "TokenTree": "specc.speculation.tree",
    "read_message": "specc.server.parsers.whole_message",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompileConfig",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "GuidedDecodingParams",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "SpeccError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenTree",
    "TokensPrompt",
    "compile",
    "read_message",
    "reshard",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    from specc.vllm.calls import refuse_name

    refuse_name("specc", name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
