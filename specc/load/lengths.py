"""How many tokens the prompts and the outputs of a load have."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from specc.errors import ConfigError

_FORMS = re.compile(
    r"(?P<fixed>\d+)"
    r"|uniform:(?P<low>\d+)-(?P<high>\d+)"
    r"|lognormal:(?P<mean>[\d.]+),(?P<spread>[\d.]+)(?:,(?P<least>\d+)-(?P<most>\d+))?"
)
_NEEDED = "a number, uniform:LEAST-MOST, or lognormal:MEAN,SPREAD[,LEAST-MOST]"
_EXAMPLES = "for example 128, uniform:64-256 or lognormal:128,0.5,8-512"


@dataclass(frozen=True)
class LengthDistribution:
    """Numbers of tokens: always the same, uniform, or log-normal and cut off at both ends.

    Args:
        least: tokens.
        most: tokens; with `mean` None all of least … most are equally likely.
        mean: of the log-normal distribution, before its ends are cut off.
        spread: its standard deviation over its mean.
    """

    text: str
    least: int
    most: int
    mean: float | None = None
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str) -> LengthDistribution:
        """Read `128`, `uniform:64-256` or `lognormal:128,0.5[,8-512]`.

        Raises:
            ConfigError: none of these, or limits that leave no length of 1 or more.
        """
        match = _FORMS.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            found = match.groupdict()
            if found["fixed"]:
                made = cls(text, int(found["fixed"]), int(found["fixed"]))
            elif found["low"]:
                made = cls(text, int(found["low"]), int(found["high"]))
            else:
                least, most = int(found["least"] or 1), int(found["most"] or 1 << 20)
                made = cls(text, least, most, float(found["mean"]), float(found["spread"]))
        except ValueError:
            raise ConfigError(f"{option} {text}", _NEEDED, _EXAMPLES) from None
        if not 1 <= made.least <= made.most or made.mean == 0:
            raise ConfigError(f"{option} {text}", "lengths of 1 or more, rising", _EXAMPLES)
        return made

    def draw(self, dice: random.Random) -> int:
        if self.mean is None:
            return dice.randint(self.least, self.most)
        variance = math.log(1 + self.spread**2)
        value = dice.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(max(round(value), self.least), self.most)
