"""Grammars of structured outputs: compiled once an engine, where that may cost what it wants."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from specc.errors import OverloadError, RequestError
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammar_child import LIMITS, STACK_BYTES, TARGET
from specc.runtime.constraints.grammar_compile import (
    DO,
    GrammarSource,
    Vocabulary,
    grammar_of,
    matcher_of,
    read_vocabulary,
    refused,
    shortened,
)
from specc.runtime.processes.bounded_pool import BoundedPool, Cancellation, JobCancelled
from specc.runtime.processes.fork_server import ChildError
from specc.runtime.processes.threads import with_large_stack
from specc.sampling.structured import StructuredOutputsConfig, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from tokenizers import Tokenizer

_log = logging.getLogger("specc.grammars")
# grammars that stay compiled, and what they may hold together
_NUM_CACHED = 64
_MAX_CACHED_BYTES = 256 << 20
# requests that wait for a grammar which another one brought
_MAX_WAITING = 256
# seconds for which a refusal is known without another attempt
_REFUSED_S = 60.0
# of all grammars that are compiled or in use
_MAX_HELD_BYTES = 2 << 30
# from this length on, a grammar may take long, and small ones go on beside it
_LARGE_CHARS = 16 << 10
_NICENESS = 5
_ANY_OBJECT = StructuredOutputsParams(json_object=True)


@dataclass(eq=False)
class _Compiled:
    """A grammar, shared by its requests.

    Args:
        ahead: the same, compiled once more, for what looks ahead: copies share a lexer.
        num_bytes: that it holds.
        state_bytes: that each request holds beside.
    """

    matcher: LLMatcher
    ahead: LLMatcher
    again: Callable[[], LLMatcher]
    num_bytes: int
    state_bytes: int
    # the library's objects belong to one thread at a time
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _Refusal:
    error: RequestError
    until_s: float


class Grammars:
    """Compiles what the requests of one engine ask for, and keeps it; for any thread.

    Args:
        tokenizer: the engine's; None refuses every request.
        vocab_size: V, token ids of the target's logits; padding included.
        eos_token_ids: end an output.
        limits: of the library's work; None is its default.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Set[int],
        limits: LLParserLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        # for requests that come from now on
        self.config = StructuredOutputsConfig()
        self._reading = threading.Lock()
        self._read: tuple[Vocabulary, LLTokenizer] | None = None
        self.children = BoundedPool(TARGET, lambda: self._vocabulary[0].to_data(), LIMITS)
        # guards what follows
        self._changed = threading.Condition()
        self._known: OrderedDict[bytes, _Compiled | _Refusal] = OrderedDict()
        self._in_work: set[bytes] = set()
        self._num_waiting = 0
        self._held = _Held()

    def start(
        self, params: StructuredOutputsParams, cancellation: Cancellation | None = None
    ) -> GrammarState:
        """The grammar of a request, at its beginning; waits while it is compiled.

        Args:
            cancellation: ends the wait, and the work if nobody else waits for it.
        Raises:
            RequestError: the library is absent, understands neither the grammar nor the tokenizer,
                or no token of the vocabulary begins such an output; or the grammar takes more
                time, memory or stack than one may.
            OverloadError: too many grammars are compiled, or held by requests.
            FaultError: there is no process to compile it in.
            JobCancelled: by `cancellation`.
        """
        cancellation = cancellation or Cancellation()
        source, key = GrammarSource.of(params, self.config), self._key(params)
        while True:
            if (found := self._find(key, cancellation)) is not None:
                return self._state_of(found)
            try:
                made = self._compile(source, cancellation)
            except RequestError as error:
                self._keep(key, _Refusal(error, time.monotonic() + _REFUSED_S))
                raise
            except BaseException:
                self._keep(key, None)
                raise
            self._keep(key, made)
            return self._state_of(made)

    def start_compiled(self, params: StructuredOutputsParams) -> GrammarState | None:
        """The same without any wait: None where the grammar has to be compiled first."""
        with self._changed:
            found = self._look(self._key(params))
        return None if found is None else self._state_of(found)

    def _key(self, params: StructuredOutputsParams) -> bytes:
        """Equal for equal grammars."""
        return params.digest + bytes(astuple(self.config))

    def close(self) -> None:
        """End what is compiled, and the requests that wait for it."""
        self.children.close()

    @property
    def _vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        """What the library knows of the tokens."""
        with self._reading:
            if self._read is None:
                eos = {*self._eos_token_ids}
                self._read = read_vocabulary(self._tokenizer, self._vocab_size, eos, self._limits)
            return self._read

    def _find(self, key: bytes, cancellation: Cancellation) -> _Compiled | None:
        """The grammar, once it is compiled; None where that is up to the caller now."""
        with cancellation.calling(self._wake), self._changed:
            if self._num_waiting >= _MAX_WAITING:
                raise OverloadError(
                    f"{self._num_waiting} requests that wait for a grammar of another one",
                    f"fewer than {_MAX_WAITING}",
                    "try again later",
                )
            self._num_waiting += 1
            try:
                self._changed.wait_for(
                    lambda: key not in self._in_work or cancellation.is_cancelled
                )
            finally:
                self._num_waiting -= 1
            if cancellation.is_cancelled:
                raise JobCancelled
            found = self._look(key)
            if found is None:
                self._in_work.add(key)
            return found

    def _look(self, key: bytes) -> _Compiled | None:
        found = self._known.get(key)
        if isinstance(found, _Refusal):
            if time.monotonic() < found.until_s:
                error = found.error
                raise type(error)(error.found, error.needed, error.do)
            del self._known[key]
            return None
        if found is not None:
            self._known.move_to_end(key)
        return found

    def _keep(self, key: bytes, made: _Compiled | _Refusal | None) -> None:
        with self._changed:
            self._in_work.discard(key)
            if made is not None:
                self._known[key] = made
                while len(self._known) > _NUM_CACHED or self._num_cached_bytes > _MAX_CACHED_BYTES:
                    self._known.popitem(last=False)
            self._changed.notify_all()

    @property
    def _num_cached_bytes(self) -> int:
        return sum(own.num_bytes for own in self._known.values() if isinstance(own, _Compiled))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _state_of(self, compiled: _Compiled) -> GrammarState:
        # and as much for what looks ahead
        num_bytes = 2 * compiled.state_bytes
        self._held.check(num_bytes)
        with compiled.lock:
            own, ahead = compiled.matcher.deep_copy(), compiled.ahead.deep_copy()
        ends = self._vocabulary[0].ends
        state = GrammarState(own, self._vocab_size, ends, (ahead, compiled.again))
        self._held.add(state, num_bytes, compiled)
        return state

    def _compile(self, source: GrammarSource, cancellation: Cancellation) -> _Compiled:
        vocabulary, tokens = self._vocabulary

        def again(found: dict[str, Any]) -> _Compiled:
            """What the child has survived, in this process."""
            self._held.check(2 * found["bytes"])

            def once_more() -> LLMatcher:
                return with_large_stack(
                    lambda: self._matcher(source, found["grammar"], tokens, vocabulary),
                    STACK_BYTES,
                    _NICENESS,
                )

            made = _Compiled(
                once_more(), once_more(), once_more, 2 * found["bytes"], found["state_bytes"]
            )
            self._held.add(made, made.num_bytes)
            return made

        if source == GrammarSource.of(_ANY_OBJECT, self.config):
            # ours, no stranger's
            return again({"grammar": grammar_of(source, tokens), "bytes": 0, "state_bytes": 0})
        try:
            return self.children.run(
                [*source],
                is_large=len(source.text) >= _LARGE_CHARS,
                cancellation=cancellation,
                then=again,
            )
        except ChildError as error:
            raise _too_costly(source, str(error)) from error

    def _matcher(
        self, source: GrammarSource, grammar: str, tokens: LLTokenizer, vocabulary: Vocabulary
    ) -> LLMatcher:
        matcher = matcher_of(source, grammar, tokens, vocabulary)
        for warning in matcher.get_grammar_warnings():
            _log.warning("%s %r: %s", source.kind, shortened(source.text), shortened(warning))
        # now, what the first mask costs delays no other request
        if GrammarState(matcher, self._vocab_size, vocabulary.ends).mask() is None:
            reason = matcher.get_error() or "its mask is empty"
            raise refused(source, f"no token begins such an output ({reason})")
        return matcher


class _Held:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        # of what has died: garbage is collected anywhere, also where the lock is held
        self._returned: deque[int] = deque()

    def check(self, num_bytes: int) -> None:
        """Raises OverloadError: there is no room for as many."""
        with self._lock:
            while self._returned:
                self._num_bytes -= self._returned.popleft()
            have = self._num_bytes
        if have + num_bytes > _MAX_HELD_BYTES:
            raise OverloadError(
                f"grammars that hold {have >> 20} MiB already",
                f"at most {_MAX_HELD_BYTES >> 20} MiB, with all requests that run or wait",
                "try again later, or ask for a smaller grammar",
            )

    def add(self, owner: object, num_bytes: int, needs: object = None) -> None:
        """Count bytes while `owner` lives, and keep what it needs."""
        with self._lock:
            self._num_bytes += num_bytes
        weakref.finalize(owner, _give_back, self._returned, num_bytes, needs).atexit = False


def _give_back(returned: deque[int], num_bytes: int, _needs: object) -> None:
    returned.append(num_bytes)


def _too_costly(source: GrammarSource, reason: str) -> RequestError:
    return RequestError(
        f"{source.kind} {shortened(source.text)!r} that cannot be compiled: {shortened(reason)}",
        f"a grammar that takes at most {LIMITS.cpu_seconds:g} s of a processor,"
        f" {(LIMITS.memory_bytes or 0) >> 20} MiB of memory, and rules that do not lead to one"
        " another in chains of tens of thousands",
        DO,
    )
