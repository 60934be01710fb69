"""When requests of a load come."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from specc.errors import ConfigError


@dataclass(frozen=True)
class Arrivals:
    """Random times of a given mean rate.

    Gaps between requests have a gamma distribution, as those of `vllm bench serve`: its shape is
    the burstiness, so their coefficient of variation is 1/√burstiness.

    Args:
        rate: requests a second on average; infinite is all at once.
        burstiness: 1 is a Poisson process, less comes in bursts, more is more even, infinite is
            one request every 1/rate seconds.
        on_off: seconds with requests, and seconds without after them, over and over. The mean rate
            stays, so requests come faster while they come. None is always on.
    Raises:
        ConfigError: a rate, a burstiness or phases that make no load.
    """

    rate: float
    burstiness: float = 1.0
    on_off: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        # written so that NaN fails
        if not self.rate > 0:
            raise ConfigError(f"a request rate of {self.rate:g}", "above 0, or inf", "raise it")
        if not self.burstiness > 0:
            raise ConfigError(
                f"a burstiness of {self.burstiness:g}",
                "above 0: 1 is a Poisson process, less comes in bursts, inf is constant",
                "raise it",
            )
        if self.on_off is not None:
            on_s, off_s = self.on_off
            if not (0 < on_s < math.inf and 0 <= off_s < math.inf):
                raise ConfigError(
                    f"{on_s:g} seconds with and {off_s:g} without requests",
                    "more than 0 seconds with requests, 0 or more without",
                    "for example 2,8",
                )

    def draw(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, rising; the first of a rate that is finite is not 0.

        The same seed gives the same gaps at every rate, but for their scale.
        """
        if math.isinf(self.rate):
            return [0.0] * count
        dice = random.Random(f"arrivals {seed}")
        times, now = [], 0.0
        for _ in range(count):
            now += self._gap(dice)
            times.append(self._with_pauses(now / self.rate))
        return times

    def _gap(self, dice: random.Random) -> float:
        """One gap, of mean 1."""
        if math.isinf(self.burstiness):
            return 1.0
        return dice.gammavariate(self.burstiness, 1 / self.burstiness)

    def _with_pauses(self, seconds: float) -> float:
        """A time of the even process, moved into the phases that have requests."""
        if self.on_off is None:
            return seconds
        on_s, off_s = self.on_off
        busy_s = seconds * on_s / (on_s + off_s)
        return busy_s + off_s * math.floor(busy_s / on_s)


def parse_rates(text: str) -> list[float]:
    """Read `1,2.5,inf`.

    Raises:
        ConfigError: no number, or one that is not above 0.
    """
    rates = []
    for part in text.split(","):
        try:
            rates.append(float(part))
        except ValueError:
            raise ConfigError(
                f"--request-rate {text}", "numbers of requests a second", "for example 1,2,4 or inf"
            ) from None
    return [Arrivals(rate).rate for rate in dict.fromkeys(rates)]


def parse_on_off(text: str | None) -> tuple[float, float] | None:
    """Read `2,8`; see `Arrivals`.

    Raises:
        ConfigError: not two numbers.
    """
    if text is None:
        return None
    try:
        on_s, off_s = map(float, text.split(","))
    except ValueError:
        raise ConfigError(
            f"--on-off {text}", "seconds with and seconds without requests", "for example 2,8"
        ) from None
    return on_s, off_s
