"""Interleaved rounds of several ways to generate the same tokens, and what their times say.

Every round runs every contender once over all prompts, in an order that rotates from round to
round, so that a slow minute of the machine hits none of them alone. A figure is the median over
rounds; its spread is the least and the greatest round. Nothing overlaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specc.progress import Advance, ignore

OFF = "off"
SPECULATIVE = "speculative"
# greatest over least of a figure's rounds, beyond which a note warns
_UNEVEN = 1.25
# ways of a peer beside plain decoding, in the names of its runs
_MODES = ("assisted", "lookup", "compiled")


@dataclass
class Measurement:
    """One contender's run over all prompts.

    Args:
        outputs: token ids of each prompt's output.
        elapsed_s: wall time of all generate calls, prefill included.
        first_token_s: mean over prompts of the time from the call to the first token.
        decode_s: wall time without prefill.
        num_decode_tokens: tokens that were emitted in it.
        num_steps: target passes of decode steps; a batch shares a pass.
        num_request_steps: the same, counted once for each request that took part.
        mean_acceptance_length: tokens a request emits in a step; None where nothing drafts, and
            where a peer that drafts does not tell.
        accepted_per_depth: share of steps in which depth 1, 2, … was accepted.
        stage_ms: milliseconds a step of each stage, where the contender tells them.
        excluded_s: what was taken off `elapsed_s`: the time of a hook that only benchmarks have.
        drafts: whether steps may emit more than one token.
    """

    outputs: list[list[int]]
    elapsed_s: float
    first_token_s: float
    decode_s: float
    num_decode_tokens: int
    num_steps: int
    num_request_steps: int
    mean_acceptance_length: float | None = None
    accepted_per_depth: list[float] = field(default_factory=list)
    stage_ms: dict[str, float] = field(default_factory=dict)
    excluded_s: float = 0.0
    drafts: bool = False

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.num_output_tokens, self.elapsed_s)

    @property
    def decode_tokens_per_s(self) -> float:
        return _ratio(self.num_decode_tokens, self.decode_s)

    @property
    def ms_per_step(self) -> float:
        """Wall time of a decode step, what the host does around the programs included."""
        return 1000 * _ratio(self.decode_s, self.num_steps)

    @property
    def requests_per_step(self) -> float:
        return _ratio(self.num_request_steps, self.num_steps)


class Contender(Protocol):
    """One way to generate: `name` as in the report, `plan` of the engine or None."""

    name: str
    plan: str | None

    def run(self) -> Measurement: ...


@dataclass(frozen=True)
class Rounds:
    """What interleaved rounds have measured.

    Args:
        contenders: in the order of the first counted round.
    """

    contenders: Sequence[Contender] = ()
    measured: Sequence[list[Measurement]] = ()

    def __iter__(self) -> Iterator[tuple[Contender, list[Measurement]]]:
        return zip(self.contenders, self.measured, strict=True)

    def of(self, name: str) -> list[Measurement]:
        """Measurements of the first contender of this name."""
        return next(measured for contender, measured in self if contender.name == name)

    def plain_of(self, name: str) -> list[Measurement] | None:
        """Measurement of plain decoding by the same peer; None if it did not run."""
        found = (measured for contender, measured in self if is_of(name, contender.name))
        return next(found, None)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Difference:
    """Where an output leaves that of plain decoding.

    Args:
        prompt: index of the prompt.
        position: index of the first output token that differs.
        expected: token of plain decoding; None where it ended before.
        found: this contender's token; None where it ended before.
        margin: gap between the target's two best logits there; None where unknown.
        is_near_tie: whether the gap is within rounding; None where unknown.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    margin: float | None = None
    is_near_tie: bool | None = None


def run_rounds(
    contenders: Sequence[Contender],
    rounds: int,
    warmup: int,
    progress: Advance = ignore,
) -> Rounds:
    """Measure all contenders round by round.

    Args:
        contenders: in the order of the first counted round.
        rounds: counted rounds.
        warmup: rounds before them, thrown away.
        progress: told before every run of those that are done, of all, and which comes next.
    """
    measured: list[list[Measurement]] = [[] for _ in contenders]
    done, total = 0, (rounds + warmup) * len(contenders)
    for number in range(-warmup, rounds):
        for index in order_of_round(number, len(contenders)):
            contender = contenders[index]
            progress(done, total, run_name(contender.name, contender.plan))
            measurement = contender.run()
            done += 1
            if number >= 0:
                measured[index].append(measurement)
    progress(done, total)
    return Rounds(contenders, measured)


def run_name(name: str, plan: str | None) -> str:
    """A contender as tables, notes and pictures call it."""
    return f"{name} {plan}" if name == SPECULATIVE else name


def is_of(name: str, plain: str) -> bool:
    """Whether a run belongs to a peer, such as `llama.cpp-lookup` to `llama.cpp`."""
    return name == plain or any(name == f"{plain}-{mode}" for mode in _MODES)


def uneven_rounds(spreads: Mapping[str, Spread], do: str) -> list[str]:
    """A note where rounds differ so much that something else must have used the machine.

    Args:
        spreads: name of what was measured → a figure of its rounds.
    """
    uneven = [
        f"{name} by {spread.max / spread.min - 1:.0%}"
        for name, spread in spreads.items()
        if spread.max > _UNEVEN * spread.min
    ]
    return [f"rounds differ: {', '.join(uneven)}; {do}"] if uneven else []


def order_of_round(number: int, count: int) -> list[int]:
    """Indices 0 … count - 1, starting one further in each round."""
    return [(place + number) % count for place in range(count)]


def find_differences(
    reference: Sequence[Sequence[int]], measurements: Sequence[Measurement]
) -> list[Difference]:
    """First difference of each prompt's output from the reference, in any of the rounds."""
    differences = []
    for prompt, want in enumerate(reference):
        found = (first_difference(prompt, want, m.outputs[prompt]) for m in measurements)
        first = min(filter(None, found), key=lambda item: item.position, default=None)
        if first is not None:
            differences.append(first)
    return differences


def first_difference(prompt: int, want: Sequence[int], got: Sequence[int]) -> Difference | None:
    """Where an output leaves the one that is wanted; None where it does not."""
    if list(want) == list(got):
        return None
    pairs = enumerate(zip(want, got, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
    return Difference(
        prompt,
        position,
        want[position] if position < len(want) else None,
        got[position] if position < len(got) else None,
    )


def break_even_length(speculative_ms: float, off_ms: float) -> float | None:
    """Mean acceptance length at which a speculative step pays as much as it costs.

    A speculative step takes `speculative_ms` and emits that many tokens; plain decoding takes
    `off_ms` for each. Below this length off is faster, above it speculation is.
    """
    return speculative_ms / off_ms if off_ms > 0 and speculative_ms > 0 else None


def summarize(
    measurements: Sequence[Measurement],
    off: Sequence[Measurement],
    plain: Sequence[Measurement] | None,
) -> dict[str, Any]:
    """Figures of a contender for JSON; those that compare do so within each round.

    Args:
        off: of the engine's plain decoding in the same rounds.
        plain: of plain decoding by the same system, against which drafting has to pay; None where
            it was not measured.
    """
    tokens_per_s = [m.tokens_per_s for m in measurements]
    speed_ups = [
        _ratio(m.tokens_per_s, o.tokens_per_s) for m, o in zip(measurements, off, strict=True)
    ]
    step_ms = Spread.of([m.ms_per_step for m in measurements])
    first = measurements[0]
    break_even = None
    if first.mean_acceptance_length is not None and plain is not None:
        lengths = [
            break_even_length(m.ms_per_step, p.ms_per_step)
            for m, p in zip(measurements, plain, strict=True)
        ]
        known = [length for length in lengths if length is not None]
        break_even = statistics.median(known) if known else None
    return {
        "tokens_per_s": statistics.median(tokens_per_s),
        "tokens_per_s_min": min(tokens_per_s),
        "tokens_per_s_max": max(tokens_per_s),
        "tokens_per_s_rounds": tokens_per_s,
        "decode_tokens_per_s": statistics.median(m.decode_tokens_per_s for m in measurements),
        "speedup_over_off": None if measurements is off else asdict(Spread.of(speed_ups)),
        "time_to_first_token_ms": 1000 * statistics.median(m.first_token_s for m in measurements),
        "ms_per_step": step_ms.median,
        "ms_per_step_min": step_ms.min,
        "ms_per_step_max": step_ms.max,
        "stage_ms_per_step": {
            name: statistics.median(m.stage_ms[name] for m in measurements)
            for name in first.stage_ms
        },
        "sequences_per_step": first.requests_per_step,
        # plain decoding emits one token a step
        "mean_acceptance_length": first.mean_acceptance_length or (None if first.drafts else 1.0),
        "accepted_per_depth": first.accepted_per_depth,
        "break_even_acceptance_length": break_even,
        "num_output_tokens": first.num_output_tokens,
        "num_steps": first.num_steps,
        "elapsed_s": statistics.median(m.elapsed_s for m in measurements),
        "excluded_s": statistics.median(m.excluded_s for m in measurements),
    }


def identity(differences: Sequence[Difference], num_prompts: int) -> dict[str, Any]:
    """Whether the outputs are plain decoding's own, for JSON."""
    return {
        "identical": not differences,
        "identical_prompts": num_prompts - len(differences),
        "identical_share": 1 - _ratio(len(differences), num_prompts),
        "differences": [asdict(item) for item in differences],
    }


def equal_token_share(
    reference: Sequence[Sequence[int]], differences: Sequence[Difference]
) -> float:
    """Share of all tokens that stand before the first difference of their output."""
    total = sum(map(len, reference))
    lost = sum(len(reference[item.prompt]) - item.position for item in differences)
    return 1 - _ratio(max(lost, 0), total)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
