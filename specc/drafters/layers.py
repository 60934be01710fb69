"""Some layers of a target, which a self-draft has or leaves out."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from specc.errors import ConfigError

_RANGES = re.compile(r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*")
KEPT, SKIPPED = "layers", "skip"


@dataclass(frozen=True)
class Layers:
    """Some layers of a target, numbered from 0 in the order of execution.

    Args:
        numbers: ascending.
        are_skipped: a draft leaves these out; else it has these alone.
    """

    numbers: tuple[int, ...]
    are_skipped: bool = False

    @classmethod
    def parse(cls, key: str, text: str) -> Layers:
        """Layers as an option has them: `layers=0-3+6` or `skip=4-5`.

        Raises:
            ConfigError: no numbers and ranges, a range that goes down, or auto.
        """
        if (key, text) == (SKIPPED, "auto"):
            raise ConfigError(
                "--draft self:skip=auto",
                "layers by number: which of them pay is measured on prompts, and a compilation has"
                " none",
                "compile without it, then run specc tune ENGINE --prompts FILE --skip auto, which"
                " says which --draft to compile with",
            )
        runs = [
            [int(number) for number in run.split("-")]
            for run in (text.split("+") if _RANGES.fullmatch(text) else ())
        ]
        if not runs or any(run[-1] < run[0] for run in runs):
            raise ConfigError(
                f"--draft self:{key}={text}",
                "numbers and ascending ranges of layers, joined by +; the first layer is 0",
                f"for example --draft self:{key}=0-3+6",
            )
        numbers = {number for run in runs for number in range(run[0], run[-1] + 1)}
        return cls(tuple(sorted(numbers)), key == SKIPPED)

    @property
    def key(self) -> str:
        """Of the option."""
        return SKIPPED if self.are_skipped else KEPT

    @property
    def option(self) -> str:
        """What users call them: `layers=0-3+6`."""
        return f"{self.key}={'+'.join(_join(run, '-') for run in self._runs())}"

    @property
    def name(self) -> str:
        """Part of the name of a plan's draft: `l0to3_6`."""
        letter = "x" if self.are_skipped else "l"
        return letter + "_".join(_join(run, "to") for run in self._runs())

    def kept(self, num_layers: int) -> tuple[int, ...]:
        """Layers that a draft has, of so many.

        Raises:
            ConfigError: a layer that the target does not have, or no layer is left.
        """
        draft = f"--draft self:{self.option}, and a target of {num_layers} layers"
        if self.numbers[-1] >= num_layers:
            raise ConfigError(
                draft, f"layers among 0 … {num_layers - 1}", "choose some that the target has"
            )
        if not self.are_skipped:
            return self.numbers
        left = tuple(n for n in range(num_layers) if n not in self.numbers)
        if not left:
            raise ConfigError(draft, "one layer that is left, or more", "skip fewer layers")
        return left

    def _runs(self) -> list[list[int]]:
        """Numbers that follow each other, together."""
        runs = itertools.groupby(enumerate(self.numbers), key=lambda item: item[1] - item[0])
        return [[number for _, number in run] for _, run in runs]


def _join(run: list[int], by: str) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}{by}{run[-1]}"
