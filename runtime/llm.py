"""`LLM(engine_dir).generate(prompts, SamplingParams(...))`, as vLLM's users know it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specc.errors import RequestError
from specc.metrics import SpecStats
from specc.runtime.detokenizer import Detokenizer
from specc.runtime.engine import Engine
from specc.runtime.in_flight import InFlight
from specc.runtime.named_policies import make_policy
from specc.runtime.outputs import RequestOutput, StreamOutput
from specc.runtime.policy import FixedPolicy, Policy
from specc.runtime.runner import Runner
from specc.runtime.scheduler import Scheduler
from specc.runtime.sequence import Sequence
from specc.sampling_params import SamplingParams

# text, token ids, or {"prompt": text}, {"prompt_token_ids": token ids}
Prompt = str | Sequence_[int] | Mapping[str, Any]

_ITERATIONS_BETWEEN_CHECKS = 32


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
    ) -> None:
        if not isinstance(engine, Engine):
            engine = Engine.load(
                engine,
                verify=verify,
                num_threads=num_threads,
                max_num_seqs=max_num_seqs,
                backend=backend,
            )
        own_policy = engine.policy if plan is None and policy is None else "fixed"
        if isinstance(policy, str):
            own_policy, policy = policy, None
        plan = engine.default_plan if plan is None else plan
        if plan not in engine.plans:
            raise RequestError(
                f"plan {plan!r}",
                f"a plan of this engine: {', '.join(engine.plans)}",
                "choose one of them, or compile the engine with this plan",
            )
        self.engine = engine
        self._runner = Runner(
            engine.target,
            engine.drafts,
            engine.steps,
            engine.cache,
            engine.prefill_chunk,
            engine.operators,
        )
        self._scheduler = Scheduler(
            engine.cache,
            engine.plans,
            policy or FixedPolicy(plan),
            engine.prefill_chunk,
            engine.position_limit,
        )
        if own_policy != "fixed":
            host = self._scheduler.host_drafts
            self._scheduler.use(make_policy(own_policy, engine.plans, host, engine.profile))
        self._in_flight = InFlight(self._scheduler, self._runner)
        # the plan of every step, unless a policy chooses
        is_fixed = policy is None and own_policy == "fixed"
        self._fixed_plan = plan if is_fixed else None
        self._num_requests = 0
        self._num_iterations = 0
        self._special_token_ids = _special_token_ids(engine.tokenizer)

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
        self._num_iterations += 1
        if self._num_iterations % _ITERATIONS_BETWEEN_CHECKS == 0:
            self.engine.check_weights()
        if not self._in_flight.advance():
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
            self._make_sequence(index, prompt, params, is_streamed)
            for index, (prompt, params) in enumerate(zip(prompt_list, params_list, strict=True))
        ]

    def _make_sequence(
        self, index: int, prompt: Prompt, params: SamplingParams, is_streamed: bool
    ) -> Sequence:
        text, token_ids = self._tokenize(index, prompt)
        self._check(index, token_ids, params)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                token_ids,
                params.stop_strings,
                params.include_stop_str_in_output,
                self._special_token_ids if params.skip_special_tokens else frozenset(),
            )
        self._num_requests += 1
        return Sequence(
            str(self._num_requests - 1),
            token_ids,
            params,
            max_seq_len=self.engine.max_seq_len,
            eos_token_ids=self.engine.eos_token_ids,
            num_drafts=len(self.engine.drafts),
            detokenizer=detokenizer,
            index=index,
            prompt=text,
            is_streamed=is_streamed,
        )

    def _tokenize(self, index: int, prompt: Prompt) -> tuple[str | None, list[int]]:
        content: Any = prompt
        if isinstance(prompt, Mapping):
            content = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(content, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"prompt {index} is text",
                    "token ids: this engine has no tokenizer",
                    "pass {'prompt_token_ids': [...]}",
                )
            try:
                content.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"prompt {index} holds a lone surrogate ({error.reason})",
                    "text that can be written as UTF-8",
                    "decode the text with the encoding that it has",
                ) from error
            token_ids = self.tokenizer.encode(content).ids
            bos = self.engine.bos_token_id
            if self.engine.add_bos and bos is not None and token_ids[:1] != [bos]:
                token_ids = [bos, *token_ids]
            return content, token_ids
        try:
            token_ids = [operator.index(token) for token in content]
        except TypeError as error:
            raise RequestError(
                f"prompt {index} of type {type(content).__name__}",
                "text, a list of token ids, or a dict with prompt or prompt_token_ids",
                "pass one of these",
            ) from error
        return (prompt.get("prompt") if isinstance(prompt, Mapping) else None), token_ids

    def _check(self, index: int, token_ids: list[int], params: SamplingParams) -> None:
        max_seq_len, vocab_size = self.engine.max_seq_len, self.engine.vocab_size
        if not token_ids:
            raise RequestError(
                f"prompt {index} has no tokens", "at least one token", "pass a non-empty prompt"
            )
        if len(token_ids) >= max_seq_len:
            raise RequestError(
                f"prompt {index} has {len(token_ids)} tokens",
                f"at most {max_seq_len - 1}: the engine's max_seq_len is {max_seq_len}",
                "shorten the prompt, or compile with a larger --max-seq-len",
            )
        wrong = next((t for t in token_ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt {index} holds token id {wrong}",
                f"0 … {vocab_size - 1}",
                "tokenize with the engine's own tokenizer",
            )
        self._check_rule(index, params)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                f"prompt {index} has stop strings",
                "stop_token_ids: this engine has no tokenizer",
                "pass stop_token_ids",
            )

    def _check_rule(self, index: int, params: SamplingParams) -> None:
        """Raises RequestError: the rule is not lossless for the trees of the only plan in use."""
        plan = self.engine.plans.get(self._fixed_plan or "")
        if plan is None or params.is_greedy or not params.speculative or params.rule is None:
            return
        if params.rule_id not in plan.rules:
            names = ", ".join(rule.name.lower() for rule in plan.rules)
            lost, do = "how often, and in which order, the draft drew a token", ""
            if params.rule_id in dataclasses.replace(plan, tile=None).rules:
                lost = f"the logits of all but {plan.tile} nodes by the time of the walk"
                do = ", or compile with a larger --max-logits-mb"
            raise RequestError(
                f"prompt {index} with rule={params.rule!r}; the trees of plan {plan.name} have lost"
                f" {lost}",
                f"a rule that is lossless for such trees: {names}",
                f"pass one of them, leave rule out, or choose another plan{do}",
            )


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


def _special_token_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
