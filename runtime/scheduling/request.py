"""State of one request, and the rules by which it ends."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from specc.runtime.drafters.block_choice import BlockChoice
from specc.runtime.outputs.detokenizer import Detokenizer
from specc.runtime.outputs.request_output import CompletionOutput, RequestOutput, StreamOutput
from specc.runtime.scheduling.state_slabs import NOWHERE
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.constraints.grammar import GrammarState
    from specc.runtime.constraints.logit_controls import LogitControls
    from specc.runtime.drafters.prediction import Prediction
    from specc.runtime.drafters.suffix_index import SuffixIndex
    from specc.runtime.outputs.logprobs import PromptLogprobs, TokenLogprobs
    from specc.runtime.requests.salt import Salt

# tokens that are decoded at once where nobody reads the text of each
_DECODE_TOGETHER = 16


class Request:
    """A request from arrival to its last token.

    `cache_len` and `draft_lens` count committed rows of the target and of each draft; only the
    scheduler moves them: after a pass, with blocks that hold rows already, and to 0 when it takes
    the blocks away. Once prefill is done, the request has `cache_len + 1` tokens: the last one,
    the root of the next tree, has no row.

    Args:
        prompt_token_ids: at least one, fewer than `max_seq_len`.
        max_seq_len: tokens of prompt and output together.
        eos_token_ids: end the output unless `ignore_eos`.
        num_drafts: drafts of the engine.
        detokenizer: None leaves the text empty.
        index: which of the caller's prompts.
        prompt: the caller's text.
        is_streamed: keep an event for every token.
        priority: lower ones are served first; see `Scheduler`.
        timeout_s: seconds from arrival after which it ends with what it has.
        clock: seconds.
        grammar: that the output follows, at its beginning; moved on with every token.
        controls: of what the output may hold.
        output: which of the prompt's outputs.
        leader: a request of the same prompt, whose rows this one waits for while they come.
        adapter: number of the adapter that the target runs with, -1 for none; None: it has none.
        salt: whose rows, outputs and acceptance it shares; None is those of all without one.
        prediction: what the output may be.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_seq_len: int,
        eos_token_ids: Set[int] = frozenset(),
        num_drafts: int = 0,
        detokenizer: Detokenizer | None = None,
        index: int = 0,
        prompt: str | None = None,
        is_streamed: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammar: GrammarState | None = None,
        controls: LogitControls | None = None,
        output: int = 0,
        leader: Request | None = None,
        adapter: int | None = None,
        salt: Salt | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.output = output
        self.leader = leader
        self.adapter = adapter
        self.salt = salt
        # it follows the output, whatever becomes of rows
        self.prediction = prediction
        self.prompt = prompt
        self.params = params
        self.grammar = grammar
        self.controls = controls
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        room = max_seq_len - self.num_prompt_tokens
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.cache_len = 0
        self.draft_lens = [0] * num_drafts
        self.blocks: list[int] = []
        # of these, the first that are as they were when `BlockRows` last wrote them down
        self.num_kept_blocks = 0
        # in the states of layers that keep some, from admission on
        self.state_place = NOWHERE
        # key of the states of its own that were kept last
        self.kept_key: bytes | None = None
        # of `PrefixCache`: keys of its blocks, and how many of them others can find
        self.block_keys: list[bytes] = []
        self.num_published = 0
        self.num_published_of = [0] * num_drafts
        # tokens that prefill feeds: the prompt, and after a preemption the output so far but for
        # its last token, whose row a step writes
        self.prefill_end = self.num_prompt_tokens
        self.logprobs: list[TokenLogprobs] = []
        # of each prompt token but the first, as far as prefill has come
        self.prompt_logprobs: list[TokenLogprobs] = []
        # of the host's lookups, once a plan asks for one
        self.suffix_index: SuffixIndex | None = None
        # of the blocks that self-drafts see
        self.block_choice = BlockChoice()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stats = SpecStats()
        self.events: deque[StreamOutput] = deque()
        self.sampling_values = _values(params)
        self.sampling_words = _words(params, self.num_prompt_tokens)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._detokenizer = detokenizer
        self._is_streamed = is_streamed
        # whether somebody needs the text of every token as it comes
        self._is_read_by_token = is_streamed or bool(params.stop_strings)
        self._pending: list[int] = []  # tokens without text yet
        self._clock = clock
        self.arrival_s = clock()
        self.priority = priority
        self.deadline_s = None if timeout_s is None else self.arrival_s + timeout_s
        self._admitted: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        return self.cache_len >= self.prefill_end

    @property
    def has_output(self) -> bool:
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """The next prefill pass has to say how likely the tokens of the prompt are."""
        return self.params.prompt_logprobs is not None and not self.has_output

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def output_tail(self, count: int) -> list[int]:
        """The last tokens of the output; fewer where it has not so many."""
        return self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - count) :]

    @property
    def may_draft(self) -> bool:
        """Whether its grammar, if it has one, can be asked what may follow drafted tokens."""
        return self.grammar is None or self.grammar.may_look_ahead

    @property
    def has_active_controls(self) -> bool:
        """Whether controls change anything from here on; once False, it stays so."""
        return self.controls is not None and self.controls.is_active(self.num_output_tokens)

    @property
    def num_tokens_left(self) -> int:
        """Tokens up to the length limit."""
        return self.num_prompt_tokens + self.max_tokens - len(self.token_ids)

    @property
    def text(self) -> str:
        if self._detokenizer is None:
            return ""
        self._decode_pending()
        return self._detokenizer.text

    def admit(self, blocks: list[int], num_cached: int = 0, draft_lens: Sequence[int] = ()) -> None:
        """Own blocks from now on, the first of which may hold rows already.

        Args:
            blocks: in the order of the rows.
            num_cached: rows of the target that they hold.
            draft_lens: rows that they hold of each draft, at most `num_cached`; none for ().
        """
        self.blocks = blocks
        self.num_kept_blocks = 0
        self.cache_len = num_cached
        self.draft_lens = list(draft_lens) or [0] * len(self.draft_lens)
        if self._admitted is None:
            self._admitted = self._clock()
            self.stats.num_cached_tokens = num_cached

    def preempt(self) -> list[int]:
        """Give up all rows, to compute them again later; returns the blocks."""
        blocks, self.blocks = self.blocks, []
        self.block_choice.clear()
        self.num_kept_blocks = 0
        self.cache_len = 0
        self.draft_lens = [0] * len(self.draft_lens)
        self.prefill_end = len(self.token_ids) - self.has_output
        self.stats.num_preemptions += 1
        return blocks

    def end(self, reason: str) -> None:
        """End where it is, with what it has."""
        if self._detokenizer is not None:
            self._decode_pending()
            self._detokenizer.flush()
        self.finish_reason = reason
        if self._is_streamed:
            self.events.append(self._event(None))
        self._close()

    def append_first(self, token_id: int, logprobs: list[TokenLogprobs] | None = None) -> None:
        """Take the token that the prefill pass yields."""
        self.stats.num_prompt_tokens = self.num_prompt_tokens
        first_token_s = self._clock() - self.arrival_s
        if self.append([token_id], logprobs):
            self.stats.record_first_token(first_token_s)

    def append(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> int:
        """Take tokens in order, up to the one at which plain decoding would end.

        Args:
            token_ids: one or more.
            logprobs: of each, where the request asks for them.
        Returns:
            tokens taken; the others come after the end. None where the controls or the grammar
            refuse the first.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if self.controls is not None and (reason := self._refusal(token_id)) is not None:
                return self._end_before(reason, count - 1)
            self.token_ids.append(token_id)
            if self.grammar is not None and not self.grammar.advance(token_id):
                # not before: an interrupt between the two would leave a request that seems whole
                del self.token_ids[-1]
                return self._end_before(self.grammar.error, count - 1)
            if logprobs is not None:
                self.logprobs.append(logprobs[count - 1])
            self._update_end(token_id)
            if self._is_streamed:
                self.events.append(self._event(token_id))
            if self.finish_reason is not None:
                self._close()
                return count
        return len(token_ids)

    @property
    def end_token_ids(self) -> Set[int]:
        """Tokens that end the output, whatever its text is."""
        return self._eos_token_ids | self._stop_token_ids

    def to_output(self) -> RequestOutput:
        has_logprobs = self.params.logprobs is not None
        completion = CompletionOutput(
            self.output,
            self.output_token_ids,
            self.text,
            self.finish_reason,
            self.stop_reason,
            self.logprobs if has_logprobs else None,
        )
        prompt_token_ids = self.token_ids[: self.num_prompt_tokens]
        return RequestOutput(
            self.request_id,
            self.prompt,
            prompt_token_ids,
            [completion],
            self.stats,
            prompt_logprobs=self.all_prompt_logprobs,
        )

    @property
    def all_prompt_logprobs(self) -> PromptLogprobs | None:
        """Of each token of the prompt, None for the first; None where not asked for."""
        if self.params.prompt_logprobs is None or self.is_scored:
            return None
        return [None, *self.prompt_logprobs]

    def _update_end(self, token_id: int) -> None:
        """End by token, then by length; a stop string that this token completes goes first."""
        if token_id in self._eos_token_ids:
            self.finish_reason = "stop"
        elif token_id in self._stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        # the text of a token that ends the output is left out, as a stop string is
        has_text = self.finish_reason is None or self.params.include_stop_str_in_output
        if self.grammar is not None and self.grammar.is_over:
            # nothing may follow, with `ignore_eos` either
            self.finish_reason = self.finish_reason or "stop"
        if len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens:
            self.finish_reason = self.finish_reason or "length"
        if self._detokenizer is None:
            return
        if has_text:
            self._pending.append(token_id)
        stop = None
        is_finished = self.finish_reason is not None
        if self._is_read_by_token or is_finished or len(self._pending) >= _DECODE_TOGETHER:
            stop = self._decode_pending()
        if stop is None and is_finished:
            stop = self._detokenizer.flush()
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _refusal(self, token_id: int) -> str | None:
        """Why the controls, with the grammar, do not allow a token: they had left none."""
        if self.controls is None or not self.has_active_controls:
            return None
        mask = None if self.grammar is None else self.grammar.mask()
        if self.grammar is not None and mask is None:
            return None  # it has an error of its own
        is_listed = mask is None or mask[token_id >> 3] >> (token_id & 7) & 1
        tail = self.output_tail(self.controls.num_tokens_read)
        if is_listed and self.controls.allows(tail, self.num_output_tokens, token_id):
            return None
        names = [*self.controls.names, *(["structured_outputs"] if self.grammar else [])]
        return f"{' and '.join(names)} leave no token that can follow"

    def _end_before(self, reason: str | None, num_taken: int) -> int:
        """End without the token that was to come."""
        self.stop_reason = reason
        self.end("error")
        return num_taken

    def _decode_pending(self) -> str | None:
        """Give the tokens that wait to the detokenizer; returns a stop string they complete."""
        assert self._detokenizer is not None
        pending, self._pending = self._pending, []
        return self._detokenizer.push(*pending)

    def _event(self, token_id: int | None) -> StreamOutput:
        text = self._detokenizer.take_delta(self.is_finished) if self._detokenizer else ""
        return StreamOutput(
            self.request_id,
            self.index,
            token_id,
            text,
            finished=self.is_finished,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=self.stats if self.is_finished else None,
            logprobs=self.logprobs[-1] if self.logprobs and token_id is not None else None,
            output=self.output,
        )

    def _close(self) -> None:
        self.stats.num_requests = 1
        begin_s = self.arrival_s if self._admitted is None else self._admitted
        self.stats.elapsed_s = self._clock() - begin_s
        if self.prediction is not None:
            self.stats.record_prediction(*self.prediction.coverage(self.output_token_ids))


def _values(params: SamplingParams) -> list[float]:
    """Columns of `specc.sampling.rows.Value`."""
    # infinite and subnormal temperatures are refused or greedy; the rest is exact in float32
    penalties = (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    return [params.temperature, params.top_p, params.min_p, *penalties]


def _words(params: SamplingParams, num_prompt_tokens: int) -> list[int]:
    """Columns of `specc.sampling.rows.Word`."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [seed, max(params.top_k, 0), params.rule_id, num_prompt_tokens]
