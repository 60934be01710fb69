"""What parsers are called on the command line, which is told without loading them; vLLM's names."""

from __future__ import annotations

from specc.close_name import advice
from specc.errors import ConfigError

REASONING_PARSERS = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45",
    "gemma4", "glm45", "glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3", "kimi_k2", "kimi_k3",
    "mimo", "minimax_m2", "minimax_m3", "mistral", "nemotron_v3", "olmo3", "openai_gptoss",
    "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
)  # fmt: skip
TOOL_CALL_PARSERS = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "deepseek_v4", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite",
    "granite-20b-fc", "granite4", "hermes", "hunyuan_a13b", "hy_v3", "internlm", "jamba", "kimi_k2",
    "kimi_k3", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo",
    "minimax_m2", "minimax_m3", "mistral", "olmo3", "openai", "phi4_mini_json", "poolside_v1",
    "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
)  # fmt: skip
# calls → thinking of one form, which has both
ONE_FORM = {"openai": "openai_gptoss", "kimi_k3": "kimi_k3"}


def agreed_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None
) -> tuple[str | None, str | None]:
    """The names of both, of which one may follow from the other.

    Args:
        tool_call_parser: what tells calls of tools from content; None is none.
        reasoning_parser: what tells thinking from it; likewise.
    Raises:
        ConfigError: no such name, or two that do not go together.
    """
    names = (
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
        ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS),
    )
    for option, value, known in names:
        if value is not None and value not in known:
            raise ConfigError(
                f"{option}={value!r}",
                f"one of {', '.join(known)}",
                advice(value, known, "choose one of them"),
            )
    if tool_call_parser is None:
        return None, reasoning_parser
    own = ONE_FORM.get(tool_call_parser)
    if own is not None and reasoning_parser is None:
        # one form, and vLLM reads all of it, too, for this option
        reasoning_parser = own
    if own != reasoning_parser and (own or reasoning_parser in ONE_FORM.values()):
        pairs = (f"{thinks!r} with {calls!r}" for calls, thinks in ONE_FORM.items())
        raise ConfigError(
            f"reasoning_parser={reasoning_parser!r} with tool_call_parser={tool_call_parser!r}",
            f"{' or '.join(pairs)}, parts of one form, or none of these",
            "choose both of one form",
        )
    return tool_call_parser, reasoning_parser
