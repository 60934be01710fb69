"""What parsers are called on the command line, which is told without loading them; vLLM's names."""

from __future__ import annotations

REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "qwen3_coder")
