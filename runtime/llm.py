"""`LLM(engine_dir).generate(prompts, SamplingParams(...))`, as vLLM's users know it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specc.errors import RequestError
from specc.metrics import SpecStats
from specc.runtime.engine import Engine
from specc.runtime.engine_core import EngineCore
from specc.runtime.outputs import RequestOutput, StreamOutput
from specc.runtime.policy import Policy
from specc.runtime.request_maker import Prompt
from specc.runtime.sequence import Sequence
from specc.sampling_params import SamplingParams


class LLM:
    """A loaded engine that serves requests; for one thread.

    Args:
        engine: engine directory, or an `Engine` that was loaded before.
        plan: speculation plan of every step; None is the engine's default, or, where it was
            compiled with combine="best", the better of two for every sequence; after `specc tune`,
            what was best for the number of sequences.
        max_num_seqs: sequences that run together; None is what the engine was compiled for. Not
            with a loaded `Engine`, which has its caches already.
        policy: picks the plan of each step instead of `plan`; or its name: `fixed`, `adaptive`
            (learns how long a chain pays), `best`, `profile`.
        verify: compare the files with the hashes of the manifest; None leaves out the weights.
        num_threads: threads of torch, for the whole process; None leaves them alone. Compiled
            programs keep the number that they were loaded with.
        backend: `eager` runs the graphs of any engine; None is what it was compiled for.
        kv_cache_tokens: rows of the cache, for all sequences together; None is the worst case.
        shares_prefixes: rows of a prompt are looked for among those of earlier requests.
    Raises:
        EngineError: the engine cannot be loaded.
        RequestError: the engine has no such plan.
    """

    def __init__(
        self,
        engine: str | Path | Engine,
        plan: str | None = None,
        max_num_seqs: int | None = None,
        *,
        policy: Policy | str | None = None,
        verify: bool | None = None,
        num_threads: int | None = None,
        backend: str | None = None,
        kv_cache_tokens: int | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        self._core = EngineCore.load(
            engine,
            plan,
            max_num_seqs,
            policy=policy,
            verify=verify,
            num_threads=num_threads,
            backend=backend,
            kv_cache_tokens=kv_cache_tokens,
            shares_prefixes=shares_prefixes,
        )
        self.engine = self._core.engine
        self._scheduler = self._core.scheduler
        self._runner = self._core.runner
        self._in_flight = self._core.in_flight

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where the engine has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence_[Prompt],
        params: SamplingParams | Sequence_[SamplingParams] | None = None,
        progress: Callable[[int, int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched continuously.

        Args:
            prompts: one prompt or a list; each a text, token ids, or a dict with `prompt` or
                `prompt_token_ids`.
            params: for all prompts, or one for each.
            progress: called after every iteration with the number of finished requests, of all
                requests, and of output tokens so far.
        Returns:
            one output a prompt, in order.
        Raises:
            RequestError: a prompt or its parameters are invalid; no work has started then.
        """
        sequences = self._make_sequences(prompts, params, is_streamed=False)
        for _ in self._serve(sequences):
            if progress is not None:
                finished = sum(s.is_finished for s in sequences)
                num_tokens = sum(s.stats.num_output_tokens for s in sequences)
                progress(finished, len(sequences), num_tokens)
        return [sequence.to_output() for sequence in sequences]

    def stream(
        self,
        prompts: Prompt | Sequence_[Prompt],
        params: SamplingParams | Sequence_[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete all prompts and yield every token as it comes, `index` naming its prompt.

        Requests enter the engine with the first `next`; closing the iterator drops them. Several
        streams and `generate` may overlap: each moves all requests forward.

        Raises:
            RequestError: as `generate`, at the call.
        """
        sequences = self._make_sequences(prompts, params, is_streamed=True)
        return self._stream(sequences)

    def get_metrics(self) -> SpecStats:
        """Counters of all requests since the engine was loaded; a copy."""
        return self._scheduler.stats.copy()

    def _stream(self, sequences: list[Sequence]) -> Iterator[StreamOutput]:
        for _ in self._serve(sequences):
            yield from _drain(sequences)
        # another stream may have moved these requests to their end
        yield from _drain(sequences)

    def _serve(self, sequences: list[Sequence]) -> Iterator[None]:
        """Queue requests and move the engine on until they have ended; yield between iterations.

        Whatever ends this early (an error, a closed stream) drops the requests.
        """
        self.engine.check_weights()
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
            while not self._have_ended(sequences):
                with self._at_work():
                    self._advance()
                yield
        finally:
            for sequence in sequences:
                self._scheduler.abort(sequence)
            with self._at_work():
                self._in_flight.settle()

    def _have_ended(self, sequences: list[Sequence]) -> bool:
        """All of them have; an error where another caller's failure cost one of them its tokens."""
        self._scheduler.check(sequences)
        return all(sequence.is_finished for sequence in sequences)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Count the seconds, those of work that fails too."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._scheduler.stats.elapsed_s += time.perf_counter() - begin

    def _advance(self) -> None:
        if not self._core.advance():
            raise RequestError(
                "no request can run: another LLM holds the caches of this engine",
                "free slots and cache blocks",
                "finish or close the streams of the other LLM first",
            )

    def _make_sequences(
        self,
        prompts: Prompt | Sequence_[Prompt],
        params: SamplingParams | Sequence_[SamplingParams] | None,
        is_streamed: bool,
    ) -> list[Sequence]:
        prompt_list = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params_list = [params or SamplingParams()] * len(prompt_list)
        else:
            params_list = list(params)
        if len(params_list) != len(prompt_list):
            raise RequestError(
                f"{len(prompt_list)} prompts and {len(params_list)} SamplingParams",
                "one SamplingParams for all prompts, or one for each",
                "pass lists of equal length",
            )
        return [
            self._core.requests.make(prompt, params, index=index, is_streamed=is_streamed)
            for index, (prompt, params) in enumerate(zip(prompt_list, params_list, strict=True))
        ]


def _drain(sequences: list[Sequence]) -> Iterator[StreamOutput]:
    for sequence in sequences:
        while sequence.events:
            yield sequence.events.popleft()


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many; a flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompt_list = list(prompts)
    return [prompt_list] if prompt_list and isinstance(prompt_list[0], int) else prompt_list
