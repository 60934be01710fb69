"""Grammars of structured outputs: compiled once an engine, and where one request is in its own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple

from specc.errors import RequestError
from specc.extras import install_command
from specc.structured_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from tokenizers import Tokenizer

_NUM_CACHED = 64
_DO = "correct the StructuredOutputsParams"
_OWN_END = "<|end of a grammar|>"
# tokens whose texts are compared, and characters of a text in an error
_NUM_CHECKED = 256
_MAX_TEXT = 160


class Ends(NamedTuple):
    """Token ids that end an output; `is_own` where the model has none, and one was made up."""

    ids: tuple[int, ...]
    is_own: bool


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
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(_NUM_CACHED)(self._compile)

    def start(self, params: StructuredOutputsParams) -> GrammarState:
        """The grammar of a request, at its beginning.

        Raises:
            RequestError: the library is absent, understands neither the grammar nor the tokenizer,
                or no token of the vocabulary begins such an output.
        """
        matcher = self._compiled(*params.key)
        # the library's objects belong to one thread at a time
        with self._lock:
            own = matcher.deep_copy()
        return GrammarState(own, self._vocab_size, self._tokens[1])

    def _compile(
        self, kind: str, text: str, disable_any_whitespace: bool, whitespace_pattern: str | None
    ) -> LLMatcher:
        tokens, ends = self._tokens
        library = _library()
        options: dict[str, Any] = {}
        if disable_any_whitespace:
            options["whitespace_flexible"] = False
        if whitespace_pattern is not None:
            options["whitespace_pattern"] = whitespace_pattern
        try:
            if kind == "json":
                grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=options)
            else:
                grammar = library.grammar_from(kind, text)
        except (ValueError, RecursionError) as error:
            raise _refused(kind, text, str(error)) from error
        matcher = library.LLMatcher(tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(kind, text, matcher.get_error())
        # now, what the first mask costs delays no other request
        if GrammarState(matcher, self._vocab_size, ends).mask() is None:
            reason = matcher.get_error() or "its mask is empty"
            raise _refused(kind, text, f"no token begins such an output ({reason})")
        return matcher

    @functools.cached_property
    def _tokens(self) -> tuple[LLTokenizer, Ends]:
        """What the library knows of the vocabulary."""
        library = _library()
        if self._tokenizer is None:
            raise RequestError(
                "a request for structured outputs",
                "a tokenizer: without one, which this engine is, nobody knows a token's text",
                "compile the engine from a model with tokenizer.json",
            )
        known = {i for i in self._tokenizer.get_vocab().values() if i < self._vocab_size}
        ends, tokenizer = Ends(tuple(sorted(self._eos_token_ids & known)), False), self._tokenizer
        if not ends.ids:
            # the library needs one; `GrammarState` keeps it out of masks
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            tokenizer.add_special_tokens([_OWN_END])
            own_end = tokenizer.token_to_id(_OWN_END)
            assert own_end is not None, "it was added"
            ends = Ends((own_end,), True)
        num_ids = max(self._vocab_size, 1 + max(tokenizer.get_vocab().values()))
        try:
            tokens = library.LLTokenizer(tokenizer.to_str(), n_vocab=num_ids, eos_token=[*ends.ids])
        except ValueError as error:
            raise _not_understood(str(error)) from error
        _check_texts(self._tokenizer, tokens, sorted(known))
        return tokens, ends


class GrammarState:
    """Where one request is in its grammar; for one thread.

    `push` and `pop` look ahead along a draft's tokens, `advance` takes what the request put out.

    Args:
        matcher: at the root of the request's next tree; owned from now on.
        vocab_size: V.
        ends: tokens that end an output.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Ends) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._refused: int | None = None
        self.is_over = False

    @property
    def error(self) -> str | None:
        """Why nothing can follow although the output is not complete."""
        if self._matcher.is_error():
            return _shortened(self._matcher.get_error())
        if self._refused is not None:
            return f"the grammar does not allow token {self._refused}"
        return None

    def advance(self, token_id: int) -> bool:
        """Take a token that was put out.

        Returns:
            whether the output ends here: behind EOS, or, of a model without, where nothing but an
            end may follow; or because of `error`.
        """
        if self.is_over:
            return True
        is_end = token_id in self._ends.ids
        if self._matcher.is_stopped():
            # complete: the library takes EOS there without counting it
            self._refused = None if is_end else token_id
            self.is_over = True
        elif not self.push(token_id):
            self._refused = token_id
            self.is_over = True
        else:
            self.is_over = is_end or (self._ends.is_own and self.mask() is None)
        return self.is_over

    def mask(self) -> bytes | None:
        """Tokens that may follow: bit v % 8 of byte v // 8 for token v, V bits or more.

        None where no token may: a complete output of a model without EOS, or an `error`.
        """
        mask = self._matcher.compute_bitmask()
        # of a matcher that failed, the mask would look like that of a complete output
        if self._matcher.is_error():
            return None
        if self._ends.is_own:
            mask = _without(mask, self._ends.ids[0])
        return mask if _has_bit(mask, self._vocab_size) else None

    def push(self, token_id: int) -> bool:
        """Look one token ahead; False, and nothing changed, where the grammar does not allow it."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def pop(self) -> None:
        """Take back the last token of `push`."""
        self._matcher.rollback(1)

    def goes_on(self, mask: bytes, token_id: int) -> bool:
        """Whether this state, whose mask it is, allows a token that does not end the output."""
        is_token = 0 <= token_id < self._vocab_size and token_id not in self._ends.ids
        return is_token and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "a request for structured outputs, and no llguidance",
            "the package llguidance, which knows the grammars",
            install_command("structured"),
        ) from error
    return llguidance


def _without(mask: bytes, token_id: int) -> bytes:
    changed = bytearray(mask)
    changed[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(changed)


def _has_bit(mask: bytes, count: int) -> bool:
    """Whether one of the first `count` bits is set."""
    whole, rest = divmod(count, 8)
    return mask.count(0, 0, whole) < whole or bool(rest and mask[whole] & (1 << rest) - 1)


def _check_texts(tokenizer: Tokenizer, tokens: LLTokenizer, ids: list[int]) -> None:
    """Raises RequestError: the library reads a token as another text than the tokenizer writes."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    step = max(1, len(ids) // _NUM_CHECKED)
    for token_id in [i for i in ids if i not in special][::step]:
        written = tokenizer.decode([token_id], skip_special_tokens=False)
        read = tokens.decode_str([token_id])
        # decoders may leave out the space in front of a text
        is_part = "\N{REPLACEMENT CHARACTER}" in written + read
        if not is_part and written.strip(" ") != read.strip(" "):
            raise _not_understood(f"token {token_id} is {written!r}, read as {read!r}")


def _not_understood(message: str) -> RequestError:
    return RequestError(
        f"a tokenizer whose tokens the grammars cannot read: {_shortened(message)}",
        "a byte-level tokenizer, or one with byte fallback",
        "leave out structured_outputs, or compile the engine with another tokenizer.json",
    )


def _refused(kind: str, text: str, message: str) -> RequestError:
    return RequestError(
        f"{kind} {_shortened(text)!r}: {_shortened(message)}",
        f"what llguidance {_library().__version__} can compile",
        _DO,
    )


def _shortened(text: str) -> str:
    """One line for an error; what the library adds about its own state is left out."""
    line = " ".join(text.partition("\n<state>")[0].split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"
