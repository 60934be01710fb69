"""What requests give back, where vLLM's users import it from."""

from __future__ import annotations

from typing import Any

from specc.runtime.outputs.logprobs import Logprob as Logprob
from specc.runtime.outputs.request_output import CompletionOutput as CompletionOutput
from specc.runtime.outputs.request_output import RequestOutput as RequestOutput
from specc.vllm.calls import refuse_name


def __getattr__(name: str) -> Any:
    refuse_name(__name__, name)
