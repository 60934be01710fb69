"""What parsers are called on the command line, which is told without loading them; vLLM's names."""

from __future__ import annotations

REASONING_PARSERS = (
    "deepseek_r1", "deepseek_v3", "glm45", "glm47", "granite", "kimi_k2", "mimo", "minimax_m2",
    "mistral", "olmo3", "openai_gptoss", "qwen3", "seed_oss", "step3", "step3p5",
)  # fmt: skip
TOOL_CALL_PARSERS = (
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "gigachat3", "glm45", "glm47",
    "granite", "granite-20b-fc", "granite4", "hermes", "hunyuan_a13b", "internlm", "jamba",
    "kimi_k2", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo",
    "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic", "qwen3_coder",
    "qwen3_xml", "seed_oss", "step3", "step3p5",
)  # fmt: skip
# of one form, which has both
HARMONY_THINKS, HARMONY_CALLS = "openai_gptoss", "openai"
