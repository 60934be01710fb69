"""Prompts that are cut to a number of tokens, as evaluations ask for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from specc.errors import RequestError


@dataclass(frozen=True)
class PromptCut:
    """What stays of a prompt that is longer.

    Args:
        num_tokens: 1 or more.
        side: that is cut off: `left` keeps the end, `right` the beginning.
    """

    num_tokens: int
    side: str = "left"

    def of(self, token_ids: list[int]) -> list[int]:
        """What stays of token ids, whatever they are."""
        count = self.num_tokens
        return token_ids[-count:] if self.side == "left" else token_ids[:count]

    def encode(
        self, tokenizer: Tokenizer, plain: Encoding, adds_special: bool, bos: int | None
    ) -> list[int]:
        """Token ids of a text: what tokenizers add to it stays, and the text alone is cut.

        Args:
            plain: the text, without tokens that a tokenizer adds; it is changed.
            adds_special: they are to be added.
            bos: a token that such a prompt has to begin with.
        Raises:
            RequestError: nothing of the text would be left.
        """
        num_added = tokenizer.num_special_tokens_to_add(False) if adds_special else 0
        token_ids = self._encode(tokenizer, plain, num_added, adds_special)
        if bos is None or token_ids[:1] == [bos]:
            return token_ids
        if len(token_ids) == self.num_tokens:
            token_ids = self._encode(tokenizer, plain, num_added + 1, adds_special)
        return [bos, *token_ids]

    def _encode(
        self, tokenizer: Tokenizer, plain: Encoding, num_added: int, adds_special: bool
    ) -> list[int]:
        if self.num_tokens <= num_added:
            raise RequestError(
                f"truncate_prompt_tokens={self.num_tokens}, and a tokenizer that adds"
                f" {num_added} special tokens",
                f"{num_added + 1} or more",
                "raise it, or pass add_special_tokens=false",
            )
        plain.truncate(self.num_tokens - num_added, direction=self.side)
        return tokenizer.post_process(plain, add_special_tokens=adds_special).ids
