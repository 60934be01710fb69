"""How long an output may become, and what to say where it ends there."""

from __future__ import annotations

from typing import NamedTuple

from specc.errors import RequestError


class Limit(NamedTuple):
    """Of one request.

    Args:
        max_tokens: of its output; None is as many as the context has room for.
        is_asked: by the user.
    """

    max_tokens: int | None
    is_asked: bool
    max_seq_len: int

    def check(self) -> None:
        """Raises RequestError: more tokens are asked for than any output of the engine has."""
        if self.is_asked and self.max_tokens is not None and self.max_tokens >= self.max_seq_len:
            raise RequestError(
                f"max_tokens={self.max_tokens}, and an engine of {self.max_seq_len} tokens",
                f"at most {self.max_seq_len - 1}: the prompt has one or more",
                "lower max_tokens, or compile with a larger --max-seq-len",
            )

    def reason(self, num_tokens: int) -> str:
        """Why an output ends after so many tokens, of one that did not end by itself.

        Nothing where that is what was asked for.
        """
        if num_tokens != self.max_tokens:
            return f"where prompt and output fill the engine's {self.max_seq_len} tokens"
        if self.is_asked:
            return ""
        return f"after {num_tokens} tokens: --max-tokens allows more"
