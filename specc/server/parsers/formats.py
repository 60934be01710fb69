"""The formats of calls that this server reads, by vLLM's names for them.

Written here, as no library fits a server that has neither transformers nor a GPU's framework:
transformers' response templates (`tokenizer.parse_response`) need its tokenizers and a template
that hardly any checkpoint has, raise on malformed text, and hand arguments out only when they are
whole; openai-harmony reads the format of gpt-oss alone.
"""

from __future__ import annotations

from specc.server.parsers.bodies import CallObject
from specc.server.parsers.calls import CallFormat

# as `--tool-call-parser` calls them
CALL_FORMATS = {
    "hermes": CallFormat(CallObject, "<tool_call>", "</tool_call>"),
}
