"""From a prompt and its parameters to a checked `Request`; safe to call from any thread."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Set, Sized
from typing import Any

from tokenizers import Encoding, Tokenizer

from specc.close_name import advice
from specc.errors import ContextLengthError, RequestError
from specc.lora.request import NO_ADAPTER
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.logit_controls import LogitControls, bad_word_tokens
from specc.runtime.drafters.prediction import Prediction
from specc.runtime.engine import Engine
from specc.runtime.outputs.detokenizer import Detokenizer
from specc.runtime.requests.predicted import predicted_ids
from specc.runtime.requests.prompt_bound import PromptBound
from specc.runtime.requests.prompt_cut import PromptCut
from specc.runtime.requests.prompt_forms import Prompt, content_of, token_ids_of, utf8_of
from specc.runtime.requests.salt import Salt
from specc.runtime.scheduling.request import Request
from specc.sampling.logit_controls import check_vocabulary
from specc.sampling.params import SamplingParams
from specc.speculation.live_nodes import ANY_NODES

__all__ = ["Prompt", "RequestMaker"]

_NUM_CACHED = 64

# bytes of a text from which on it is tokenized without holding up other threads; and from which
# on it is worth a look how many tokens it has at least
_LONG_TEXT, _LARGE_TEXT = 1 << 10, 1 << 14
# bytes that may be less than any number of tokens: as many for each position of the engine, and
# in any case this many
_UNBOUNDED_PER_POSITION, _MIN_UNBOUNDED = 64, 1 << 20


class RequestMaker:
    """Makes the requests of one engine's requests; what it refuses has touched nothing.

    Args:
        engine: whose tokenizer and limits hold.
        fixed_plan: the plan of every step; None where a policy chooses.
        clock: seconds, of arrivals.
        max_seq_len: tokens of prompt and output together; None is the engine's limit.
        cuts_by_draws: what is drafted says how much of it is verified.
        shares_unsalted: requests without a salt share what they leave behind.
    """

    def __init__(
        self,
        engine: Engine,
        fixed_plan: str | None,
        clock: Callable[[], float] = time.perf_counter,
        max_seq_len: int | None = None,
        cuts_by_draws: bool = False,
        shares_unsalted: bool = True,
    ) -> None:
        self._engine = engine
        self._shares_unsalted = shares_unsalted
        self._cuts_by_draws = cuts_by_draws
        self._max_seq_len = max_seq_len or engine.max_seq_len
        self._fixed_plan = fixed_plan
        self._clock = clock
        self._numbers = itertools.count()
        self._special_token_ids = _special_token_ids(engine.tokenizer)
        # bytes of a text of which nothing tells how many tokens they are at least; tokenizing
        # them is the only way to find out
        self.max_unbounded_bytes = max(_MIN_UNBOUNDED, _UNBOUNDED_PER_POSITION * engine.max_seq_len)
        # clients send the same words again and again
        self._bad_word_tokens = functools.lru_cache(_NUM_CACHED)(
            lambda words: bad_word_tokens(words, engine.tokenizer, engine.vocab_size)
        )

    def prepare(self) -> None:
        """Do now what would hold up the first large prompt: up to a second."""
        if self._engine.tokenizer is not None:
            _ = self._bound

    @functools.cached_property
    def _bound(self) -> PromptBound:
        assert self._engine.tokenizer is not None
        return PromptBound(self._engine.tokenizer)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        index: int = 0,
        request_id: str | None = None,
        is_streamed: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        output: int = 0,
        leader: Request | None = None,
        grammar: GrammarState | None = None,
        shown_token_ids: Set[int] = frozenset(),
        prediction: Any = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Tokenize and check one request.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            index: which of the caller's prompts, for errors and outputs.
            request_id: name; None numbers requests.
            is_streamed: keep an event for every token.
            priority: lower ones are served first.
            timeout_s: seconds from now after which the request ends with what it has.
            output: which of the prompt's outputs.
            leader: a request of the same prompt, whose rows this one shares.
            grammar: of `params`, at its beginning; without one, it is compiled here.
            shown_token_ids: special tokens that the text holds in any case: markers that its reader
                looks for.
            prediction: of the output, see `predicted_ids`; None is none.
            cache_salt: of those with which the request shares rows, outputs and acceptance; else
                that of the prompt, or of its leader. None shares with all that have none.
        Raises:
            RequestError: the prompt or its parameters are invalid for this engine.
            OverloadError: too many grammars are compiled at the moment.
        """
        # the caller's may change while this request runs
        params = copy.copy(params)
        text, token_ids = self._tokenize(index, prompt)
        self._check(index, token_ids, params)
        salt = self._salt(index, prompt, cache_salt, leader)
        predicted = None if prediction is None else self._predicted(prediction, params)
        detokenizer = None
        if self._engine.tokenizer is not None:
            detokenizer = Detokenizer(
                self._engine.tokenizer,
                token_ids,
                params.stop_strings,
                params.include_stop_str_in_output,
                self._skipped(params) - shown_token_ids,
                params.min_tokens,
            )
        controls = self._controls(params)
        structured = params.structured_outputs
        if structured is not None and grammar is None:
            begin_s = time.monotonic()
            grammar = self._engine.grammars.start(structured)
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (time.monotonic() - begin_s))
        number = str(next(self._numbers))
        return Request(
            number if request_id is None else request_id,
            token_ids,
            params,
            max_seq_len=self._max_seq_len,
            eos_token_ids=self._engine.eos_token_ids,
            num_drafts=len(self._engine.drafts),
            detokenizer=detokenizer,
            index=index,
            prompt=text,
            is_streamed=is_streamed,
            priority=priority,
            timeout_s=timeout_s,
            clock=self._clock,
            grammar=grammar,
            controls=controls,
            output=output,
            leader=leader,
            adapter=self._adapter(index, params),
            salt=salt,
            prediction=predicted,
        )

    def make_outputs(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Request]:
        """The n requests of a prompt, tokenized once; `options` are those of `make`.

        Raises:
            RequestError: as `make`.
        """
        first, *others = params.each()
        leader = self.make(prompt, first, **options)
        if leader.prediction is not None:
            options["prediction"] = leader.prediction.token_ids
        tokens = {"prompt": leader.prompt, "prompt_token_ids": leader.token_ids}
        return [
            leader,
            *(
                self.make(tokens, own, output=i, leader=leader, **options)
                for i, own in enumerate(others, start=1)
            ),
        ]

    def tokenize(
        self,
        text: str,
        has_special_tokens: bool = False,
        index: int = 0,
        cut: PromptCut | None = None,
        *,
        fits: bool = True,
    ) -> list[int]:
        """Token ids of a prompt, as `make` would take them.

        Args:
            has_special_tokens: it holds them already, as a rendered chat does: none is added.
            index: which of the caller's prompts, for errors.
            cut: what stays of a longer one.
            fits: it is to be run as it is; where it is not, it may be longer than a prompt.
        Raises:
            RequestError: the engine has no tokenizer, or the text is no UTF-8; or it is too long,
                where it need not fit for `max_unbounded_bytes`.
        """
        if cut is None and fits:
            return self._tokenize(index, text, not has_special_tokens)[1]
        tokenizer = self._known_tokenizer(index)
        if (size := len(utf8_of(index, text))) > self.max_unbounded_bytes:
            raise RequestError(
                f"prompt {index} has {size} bytes, to be tokenized whatever their number",
                f"at most {self.max_unbounded_bytes}",
                "shorten the text",
            )
        adds_special = not has_special_tokens
        encoding = _encoding(tokenizer, text, adds_special and cut is None)
        if cut is None:
            return self._with_bos(encoding.ids, adds_special)
        bos = self._engine.bos_token_id if adds_special and self._engine.add_bos else None
        return cut.encode(tokenizer, encoding, adds_special, bos)

    def check_length(self, num_tokens: int, index: int = 0) -> None:
        """Raises RequestError: a prompt of this many tokens does not fit."""
        if num_tokens >= self._max_seq_len:
            raise self._too_long(f"prompt {index} has {num_tokens} tokens")

    def _predicted(self, prediction: Any, params: SamplingParams) -> Prediction:
        if not params.speculative:
            raise RequestError(
                "prediction and speculative=False", "one of them", "leave one of them out"
            )
        return Prediction(predicted_ids(self._engine, prediction))

    def _salt(
        self, index: int, prompt: Prompt, text: str | None, leader: Request | None
    ) -> Salt | None:
        if leader is not None:
            return leader.salt
        if text is None and isinstance(prompt, Mapping):
            text = prompt.get("cache_salt")
        salt = Salt.of(text, index)
        return Salt.alone() if salt is None and not self._shares_unsalted else salt

    def _tokenize(
        self, index: int, prompt: Prompt, adds_special: bool = True
    ) -> tuple[str | None, list[int]]:
        content = content_of(index, prompt)
        if isinstance(content, str):
            tokenizer = self._known_tokenizer(index)
            return content, self._encode(index, tokenizer, content, adds_special)
        # an array of one token has no length
        if isinstance(content, Sized) and getattr(content, "ndim", True):
            self.check_length(len(content), index)
        token_ids = token_ids_of(index, content)
        return (prompt.get("prompt") if isinstance(prompt, Mapping) else None), token_ids

    def _known_tokenizer(self, index: int) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise RequestError(
                f"prompt {index} is text",
                "token ids: this engine has no tokenizer",
                "pass {'prompt_token_ids': [...]}",
            )
        return self._engine.tokenizer

    def _encode(self, index: int, tokenizer: Tokenizer, text: str, adds_special: bool) -> list[int]:
        """Token ids of a text, which is refused before that where it cannot fit."""
        data = utf8_of(index, text)
        if len(data) < _LONG_TEXT:
            encoding = tokenizer.encode(text, add_special_tokens=adds_special)
        else:
            if len(data) >= _LARGE_TEXT:
                self._check_size(index, data)
            # the same tokens
            encoding = _encoding(tokenizer, text, adds_special)
            self.check_length(len(encoding), index)
        return self._with_bos(encoding.ids, adds_special)

    def _with_bos(self, token_ids: list[int], adds_special: bool) -> list[int]:
        bos = self._engine.bos_token_id
        if adds_special and self._engine.add_bos and bos is not None and token_ids[:1] != [bos]:
            return [bos, *token_ids]
        return token_ids

    def _check_size(self, index: int, text: bytes) -> None:
        """Raises RequestError: whatever its tokens are, they are too many, or may be endless."""
        least, num_unbounded = self._bound.least_tokens(text, self._max_seq_len)
        if least >= self._max_seq_len:
            raise self._too_long(f"prompt {index} has {len(text)} bytes, or {least} tokens or more")
        if num_unbounded > self.max_unbounded_bytes:
            raise ContextLengthError(
                f"prompt {index} has {len(text)} bytes",
                f"at most {self.max_unbounded_bytes} of those that this engine's tokenizer may"
                " leave out or put together without end",
                "shorten the prompt, or pass its token ids",
                self._max_seq_len,
            )

    def _too_long(self, found: str) -> ContextLengthError:
        max_seq_len = self._max_seq_len
        return ContextLengthError(
            found,
            f"at most {max_seq_len - 1} tokens: the engine's max_seq_len is {max_seq_len}",
            "shorten the prompt, or compile with a larger --max-seq-len",
            max_seq_len,
        )

    def _check(self, index: int, token_ids: list[int], params: SamplingParams) -> None:
        vocab_size = self._engine.vocab_size
        if not token_ids:
            raise RequestError(
                f"prompt {index} has no tokens", "at least one token", "pass a non-empty prompt"
            )
        self.check_length(len(token_ids), index)
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise RequestError(
                f"prompt {index} holds token id {wrong}",
                f"0 … {vocab_size - 1}",
                "tokenize with the engine's own tokenizer",
            )
        check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
        self._check_rule(index, params)
        if params.prompt_logprobs is not None and not self._engine.facts.scores_prompts:
            backend = self._engine.backend
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} and an engine of the backend {backend}",
                "passes with logits of every token: its own have a row for each request",
                "leave it out, or load the engine with another backend",
            )
        if params.stop_strings and self._engine.tokenizer is None:
            raise RequestError(
                "stop=[…] for an engine without a tokenizer",
                "a tokenizer: without one, nobody knows where a string ends",
                "pass stop_token_ids",
            )

    def _adapter(self, index: int, params: SamplingParams) -> int | None:
        """The number of the adapter that is asked for; see `Request`.

        Raises:
            RequestError: the engine has none of this name.
        """
        known = self._engine.adapters
        if params.lora is None:
            return NO_ADAPTER if known else None
        if params.lora not in known:
            raise RequestError(
                f"prompt {index} with lora={params.lora!r}",
                f"one of the engine's adapters: {', '.join(known)}"
                if known
                else "an engine with adapters: this one has none",
                advice(params.lora, known, "compile it in: specc compile --lora NAME=DIR"),
            )
        return known.index(params.lora)

    def _skipped(self, params: SamplingParams) -> frozenset[int]:
        return self._special_token_ids if params.skip_special_tokens else frozenset()

    def _controls(self, params: SamplingParams) -> LogitControls | None:
        if not params.has_controls:
            return None
        words = self._bad_word_tokens(tuple(params.bad_words or ()))
        # with `ignore_eos`, too: as in vLLM
        ends = {*self._engine.eos_token_ids, *params.stop_token_ids}
        return LogitControls(params, words, self._engine.vocab_size, ends)

    def _check_rule(self, index: int, params: SamplingParams) -> None:
        """Raises RequestError: the rule is not lossless for the trees of the only plan in use."""
        plan = self._engine.plans.get(self._fixed_plan or "")
        if params.is_greedy or not params.speculative or params.rule is None:
            return
        if self._cuts_by_draws and params.rule_id not in ANY_NODES:
            raise RequestError(
                f"prompt {index} with rule={params.rule!r}, and --confidence-threshold: how much of"
                " a tree is verified then depends on what was drawn",
                f"a rule that is lossless so: {', '.join(x.name.lower() for x in ANY_NODES)}",
                "pass one of them, or leave rule out",
            )
        if plan is None:
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


def _encoding(tokenizer: Tokenizer, text: str, adds_special: bool) -> Encoding:
    # a batch is tokenized without the lock of the interpreter
    return tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0]


def _special_token_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
