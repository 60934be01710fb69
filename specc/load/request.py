"""The requests of a load: when each comes, its prompt, how much it asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specc.errors import ConfigError
from specc.load.arrivals import Arrivals
from specc.load.lengths import LengthDistribution

# text, or token ids
Text = str | tuple[int, ...]
Tokenize = Callable[[Text], list[int]]


@dataclass(frozen=True)
class LoadRequest:
    """One request.

    Args:
        arrival_s: when it comes, seconds from the start.
        prompt: text, or token ids where a tokenizer is at hand; empty where only its length counts.
        num_prompt_tokens: None where nobody has tokenized the text.
        num_output_tokens: asked for.
    """

    index: int
    arrival_s: float
    prompt: str | list[int]
    num_prompt_tokens: int | None
    num_output_tokens: int


@dataclass(frozen=True)
class Workload:
    """What a load consists of; the same seed makes the same requests.

    Args:
        num_requests: at most; 1 or more.
        prompt_tokens: of each; None takes the prompts as they are.
        texts: prompts, text or token ids, in a shuffled order and over and over; with
            `prompt_tokens` they are one long text, of which every request gets a part of its
            length, so that hardly two of them begin alike.
        tokenize: None sends text.
        max_seconds: requests that come later are left out.
        seed: of everything.
    Raises:
        ConfigError: lengths without a tokenizer.
    """

    num_requests: int
    output_tokens: LengthDistribution
    prompt_tokens: LengthDistribution | None = None
    texts: Sequence[Text] = ()
    tokenize: Tokenize | None = None
    max_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.texts and self.tokenize is None:
            raise ConfigError(
                "--prompt-tokens without a tokenizer",
                "an engine directory, whose tokenizer cuts the prompts",
                "name the engine, or leave --prompt-tokens out",
            )

    def requests(self, arrivals: Arrivals, round_: int = 0) -> list[LoadRequest]:
        """Requests in order of arrival; every round has its own.

        Raises:
            ConfigError: none comes before `max_seconds`.
        """
        seed = self.seed + 1_000_003 * round_
        times = arrivals.draw(self.num_requests, seed)
        if self.max_seconds is not None:
            times = [time for time in times if time <= self.max_seconds]
        if not times:
            raise ConfigError(
                f"no request within {self.max_seconds:g} s at {arrivals.rate:g} a second",
                "one or more",
                "raise --max-seconds or --request-rate",
            )
        prompts = self._prompts(len(times), seed)
        dice = random.Random(f"outputs {seed}")
        return [
            LoadRequest(index, time, prompt, count, self.output_tokens.draw(dice))
            for index, (time, (prompt, count)) in enumerate(zip(times, prompts, strict=True))
        ]

    def _prompts(self, count: int, seed: int) -> list[tuple[str | list[int], int | None]]:
        dice = random.Random(f"prompts {seed}")
        if self.prompt_tokens is None:
            order = list(range(len(self.texts)))
            dice.shuffle(order)
            chosen = [self.texts[order[i % len(order)]] for i in range(count)]
            if self.tokenize is None:
                return [
                    (text, None) if isinstance(text, str) else ([*text], len(text))
                    for text in chosen
                ]
            known = {text: self.tokenize(text) for text in set(chosen)}
            return [(known[text], len(known[text])) for text in chosen]
        lengths = [self.prompt_tokens.draw(dice) for _ in range(count)]
        if self.tokenize is None:
            return [([], length) for length in lengths]
        corpus = [token for text in self.texts for token in self.tokenize(text)]
        found: list[tuple[str | list[int], int | None]] = []
        for length in lengths:
            start = dice.randrange(len(corpus))
            found.append(([corpus[(start + i) % len(corpus)] for i in range(length)], length))
        return found
