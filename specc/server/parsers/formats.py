"""The formats of calls that this server reads, by vLLM's names for them.

Written here, as no library fits a server that has neither transformers nor a GPU's framework:
transformers' response templates (`tokenizer.parse_response`) need its tokenizers and a template
that hardly any checkpoint has, raise on malformed text, and hand arguments out only when they are
whole; openai-harmony reads the format of gpt-oss alone.
"""

from __future__ import annotations

import functools

from specc.server.parsers.bodies import CallObject
from specc.server.parsers.calls import CallFormat, short_id
from specc.server.parsers.marked import ARGS, CALL_ID, MarkedParameters, MistralCalls

# as `--tool-call-parser` calls them
CALL_FORMATS = {
    "hermes": CallFormat(CallObject, "<tool_call>", "</tool_call>"),
    # JSON without a marker is a call only if it looks like nothing else
    "llama3_json": CallFormat(
        functools.partial(CallObject, needs_arguments=True),
        "<|python_tag|>",
        is_bare=True,
        between=";",
    ),
    "mistral": CallFormat(MistralCalls, "[TOOL_CALLS]", inner=(CALL_ID, ARGS), make_id=short_id),
    "qwen3_coder": CallFormat(
        MarkedParameters, "<tool_call>", "</tool_call>", interrupts="<tool_call>\n<function="
    ),
}
