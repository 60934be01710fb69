"""Prompts as dicts, by the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text: `TextPrompt(prompt="…")`; `cache_salt` parts it from prompts of other salts."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids: `TokensPrompt(prompt_token_ids=[…])`; `prompt` is the text that outputs show."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
