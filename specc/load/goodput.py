"""Which requests of a load were served well enough."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from specc.errors import ConfigError
from specc.load.result import RequestResult

# time to first token, time of each further token, end-to-end latency; as `vllm bench serve`
NAMES = ("ttft", "tpot", "e2el")


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:200 tpot:50 e2el:2000`, also with commas or in several parts.

    Returns:
        name → milliseconds at most.
    Raises:
        ConfigError: another name, or no number above 0.
    """
    found: dict[str, float] = {}
    for part in re.split(r"[\s,]+", " ".join(texts).strip()):
        if not part:
            continue
        name, _, value = part.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in NAMES or not number > 0:
            raise ConfigError(
                f"--goodput {part}",
                f"one of {', '.join(NAMES)}, a colon, and milliseconds above 0",
                'for example --goodput "ttft:200 tpot:50 e2el:2000"',
            )
        found[name] = number
    return found


def is_good(result: RequestResult, objectives: Mapping[str, float]) -> bool:
    """Whether a request ended and kept all objectives; one token has no time of further ones."""
    if not result.is_ok:
        return False
    seconds = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.latency_s}
    return all(1000 * seconds[name] <= most for name, most in objectives.items())
