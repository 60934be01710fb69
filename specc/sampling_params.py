"""Options of requests, where vLLM's users import them from."""

from __future__ import annotations

from typing import Any

from specc.sampling.params import RequestOutputKind as RequestOutputKind
from specc.sampling.params import SamplingParams as SamplingParams
from specc.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
from specc.vllm.calls import refuse_name


class GuidedDecodingParams(StructuredOutputsParams):
    """`StructuredOutputsParams`, as vLLM called it: for `SamplingParams(guided_decoding=…)`."""


def __getattr__(name: str) -> Any:
    refuse_name(__name__, name)
