"""What a peer is: a converter of checkpoints, and a loader of what it has converted.

The modules of peers run in processes of their own (`worker.py`, `convert.py`): one that crashes
takes no other along, and no library's threads or allocators are in another's way.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specc.bench.rounds import Measurement


class NotAvailableError(Exception):
    """The peer cannot do this; the message is the reason, for reports."""


@dataclass(frozen=True)
class Form:
    """How a model's weights are to be.

    Args:
        integers: `int8` or `int4`, of projections, in a layout of the peer's own; None is `dtype`.
    """

    dtype: str
    integers: str | None = None

    def __str__(self) -> str:
        return (
            self.dtype if self.integers is None else f"{self.dtype} with weights in {self.integers}"
        )


@dataclass(frozen=True)
class Job:
    """What a process is to run.

    Args:
        mode: of `names.MODES`.
        target: directory or file that the peer's converter wrote; the checkpoint, where it has no
            converter.
        draft: the same of the draft; None unless the mode is assisted.
        threads: of every process.
        batches: token ids of prompts, by batch.
        max_tokens: output tokens of each prompt; end-of-sequence tokens do not end it.
        depth: draft tokens of the engine's plan.
    """

    mode: str
    target: str
    draft: str | None
    dtype: str
    threads: int
    batches: list[list[list[int]]]
    max_tokens: int
    depth: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its output."""
        return max(len(ids) for batch in self.batches for ids in batch) + self.max_tokens


class Loaded(Protocol):
    """A mode of a peer, loaded and ready to run.

    `settings` are the ways to run it that are tried before the rounds, by name; the fastest is
    kept. Where there is one way only, it is called `default`.
    """

    settings: Mapping[str, Mapping[str, Any]]

    def run(self, setting: str) -> Measurement:
        """Generate for all batches, greedily, with no rows kept from one prompt to the next."""
        ...


class Converter(Protocol):
    """What a peer's `PEER` is besides, unless it reads checkpoints as they are."""

    def convert(self, checkpoint: Path, form: Form, output: Path) -> None:
        """Write a model that `load` reads into the empty directory `output`.

        Raises:
            NotAvailableError: the peer has no such models or forms.
        """
        ...


class Peer(Protocol):
    """`PEER` of a peer's module."""

    def load(self, job: Job) -> Loaded:
        """Load a mode.

        Raises:
            NotAvailableError: the peer cannot do this, and why.
        """
        ...


@dataclass
class BatchTimes:
    """One call over one batch, as a peer saw it.

    Args:
        size: prompts.
        first_s: mean over its prompts of seconds from the call to the first token.
        steps: target passes after the one that gave the first token.
        request_steps: the same, counted once for each prompt that took part; None where the peer
            does not tell.
        first_tokens: that the first pass gave, of all prompts; None is one of each.
    """

    size: int
    first_s: float
    steps: int
    request_steps: int | None
    first_tokens: int | None = None


def measurement(
    outputs: list[list[int]], elapsed_s: float, times: Sequence[BatchTimes], drafts: bool
) -> Measurement:
    """What a run measured, from what each of its batches took.

    Args:
        outputs: token ids of each prompt's output.
        elapsed_s: wall time of all calls.
        drafts: whether steps emit more than one token.
    """
    firsts = sum(one.size if one.first_tokens is None else one.first_tokens for one in times)
    num_decode_tokens = sum(map(len, outputs)) - firsts
    known = [one.request_steps for one in times if one.request_steps is not None]
    request_steps = sum(known) if len(known) == len(times) else 0
    length = num_decode_tokens / request_steps if drafts and request_steps else None
    return Measurement(
        outputs=outputs,
        elapsed_s=elapsed_s,
        first_token_s=statistics.fmean(one.first_s for one in times for _ in range(one.size)),
        decode_s=elapsed_s - sum(one.first_s for one in times),
        num_decode_tokens=num_decode_tokens,
        num_steps=sum(one.steps for one in times),
        num_request_steps=request_steps,
        mean_acceptance_length=length,
        drafts=drafts,
    )
