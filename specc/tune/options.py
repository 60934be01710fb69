"""What tuning measures, as users ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError
from specc.option import check_ranges, option

AUTO = "auto"


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Args:
        batch_sizes: empty is powers of two up to the engine's max_batch_size, at most 8.
        context: tokens of each prompt; None is as they are.
        temperature: of the requests; their seeds are 0, 1, …
        rounds: interleaved; a round before them is not counted.
        latency_s: seconds after which no further round of single passes begins.
        skip: `auto` searches for layers that a self-draft does without, and does nothing else.
    Raises:
        ConfigError: a value outside its range.
    """

    batch_sizes: tuple[int, ...] = option(
        (), "Sequences that run together; repeatable. Without it: 1, 2, 4 and 8.", "--batch-size"
    )
    max_nodes: int = option(32, "Most nodes of a tree, its root included.", least=2, most=1024)
    max_depth: int = option(8, "Most levels of a tree.", least=1)
    max_tokens: int = option(64, "Output tokens to generate for each prompt.", "--tokens", least=2)
    context: int | None = option(
        None,
        "Tokens that prompts are joined to, and repeated where they are too few: what self-drafts"
        " accept depends on it. Without it: prompts as they are.",
        least=2,
    )
    temperature: float = option(0.0, "Temperature that requests will have; 0 is greedy.")
    rounds: int = option(3, "Rounds of whole runs that are measured.", least=1)
    latency_s: float = 20.0
    prunes: bool = option(
        False, "Remove the engine's plans that no batch size has chosen.", "--prune"
    )

    skip: str | None = option(
        None,
        "auto: search for layers of the target that a self-draft could do without, and say which"
        " --draft to compile with; the engine stays as it is.",
        metavar="auto",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.skip not in (None, AUTO):
            raise ConfigError(
                f"--skip {self.skip}",
                f"{AUTO}: layers that you know are named at compile",
                f"pass --skip {AUTO}, or compile with --draft self:skip={self.skip}",
            )
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature}", "0 or more", "correct it")
