"""Token ids to text, one token at a time, with stop strings.

Concatenated deltas are always the final text: text is defined as their concatenation, and nothing
is handed out that a later token could still change.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from tokenizers import Tokenizer

# what a decoder shows for bytes that are not (or not yet) valid UTF-8
_REPLACEMENT = "\ufffd"
# prompt tokens that give the first output token its context: some decoders strip a leading space
_CONTEXT_TOKENS = 5


class Detokenizer:
    """Text of one request.

    Args:
        tokenizer: of the model.
        prompt_token_ids: the last few are context of the first output token.
        stop_strings: the text is cut before the first of them.
        include_stop: keep the stop string in the text.
        skipped_token_ids: tokens that the text leaves out: special tokens, unless they are wanted.
        min_tokens: first tokens whose text completes no stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        skipped_token_ids: Set[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        # tokens that are to come before a stop string may be complete; below 0 after the first
        # that may complete one
        self._num_early = min_tokens
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._skipped_token_ids = skipped_token_ids
        self._num_streamed = 0
        # decoding restarts at a window of tokens instead of the first token: its first part,
        # up to `_read`, has been decoded completely; `_done` characters of its text are in `text`
        self._window = [t for t in prompt_token_ids[-_CONTEXT_TOKENS:] if not self._is_skipped(t)]
        self._read = len(self._window)
        decoded = self._decode(self._window)
        self._done = len(decoded)
        # where a character that the prompt leaves incomplete begins
        self._incomplete = len(decoded.rstrip(_REPLACEMENT))

    def push(self, *token_ids: int) -> str | None:
        """Add tokens; several at once cost hardly more than one, where no text is due between.

        Returns:
            the first stop string that they complete; the text is cut and final then.
        """
        self._num_early -= len(token_ids)
        shown = [token_id for token_id in token_ids if not self._is_skipped(token_id)]
        if not shown:
            return None
        self._window += shown
        decoded = self._decode(self._window)
        if len(shown) > 1 and _REPLACEMENT in decoded:
            # decoders judge a run of bytes as a whole: what is incomplete is shown token by token
            del self._window[-len(shown) :]
            self._num_early += len(shown)
            return next((stop for token in shown if (stop := self.push(token))), None)
        if decoded[self._incomplete : self._done].strip(_REPLACEMENT):
            # the output has completed it, so it belongs to the output
            self._done = self._incomplete
        # a replacement character at the end can be the first bytes of a character: hold it back
        stable = len(decoded.rstrip(_REPLACEMENT))
        if stable <= self._done:
            return None
        new_text = decoded[self._done : stable]
        self._done = self._incomplete = stable
        if stable == len(decoded):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._done = self._incomplete = len(self._decode(self._window))
        return self._append(new_text)

    def flush(self) -> str | None:
        """Add what was held back as incomplete; to be called once, after the last token.

        Returns:
            the stop string that this completes.
        """
        return self._append(self._decode(self._window)[self._done :])

    def take_delta(self, is_final: bool) -> str:
        """Characters that are new since the last call; never a part of a stop string."""
        end = len(self.text) if is_final else len(self.text) - self._num_held_back()
        delta = self.text[self._num_streamed : end]
        self._num_streamed = end
        return delta

    def _append(self, new_text: str) -> str | None:
        num_old = len(self.text)
        self.text += new_text
        if self._num_early >= 0:
            return None
        found: tuple[int, str] | None = None
        for stop in self._stop_strings:
            index = self.text.find(stop, max(0, num_old - len(stop) + 1))
            if index >= 0 and (found is None or index < found[0]):
                found = index, stop
        if found is None:
            return None
        index, stop = found
        self.text = self.text[: index + len(stop) if self._include_stop else index]
        return stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that can become a stop string."""
        if self._include_stop:
            return 0
        return max(
            (
                size
                for stop in self._stop_strings
                for size in range(1, len(stop))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )

    def _is_skipped(self, token_id: int) -> bool:
        """Has no text; kept out of the window, which a long run of such tokens would lengthen."""
        return token_id in self._skipped_token_ids or self._tokenizer.id_to_token(token_id) is None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
