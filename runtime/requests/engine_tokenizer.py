"""The tokenizer that `LLM.get_tokenizer` hands out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer

from specc.errors import RequestError
from specc.runtime.requests.tool_messages import render_chat

if TYPE_CHECKING:
    from specc.runtime.core import EngineCore

Conversation = Sequence[Mapping[str, Any]]


class EngineTokenizer:
    """An engine's tokenizer, with the methods of transformers' that people use.

    It is none of transformers' classes, which a deployed engine does not have: `tokenizer` is the
    `tokenizers.Tokenizer` beneath. Texts become the ids that `generate` would make of them.

    Raises:
        RequestError: the engine has no tokenizer.
    """

    def __init__(self, core: EngineCore) -> None:
        tokenizer = core.engine.tokenizer
        if tokenizer is None:
            raise RequestError(
                "an engine without a tokenizer",
                "token ids for prompts, and token ids of outputs",
                "tokenize yourself, or compile a target directory that holds tokenizer.json",
            )
        self.tokenizer: Tokenizer = tokenizer
        self._requests = core.requests
        self._core = core
        self.bos_token_id = core.engine.bos_token_id
        self.eos_token_ids = sorted(core.engine.eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None

    def __await__(self) -> Generator[None, None, Self]:
        """For `await llm.get_tokenizer()`, as vLLM's `AsyncLLM` has it."""
        return self
        yield

    @property
    def vocab_size(self) -> int:
        """Tokens, without those that were added."""
        return self.tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token → id, with those that were added."""
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: as a prompt gets them; False for a text that holds them already.
        Raises:
            RequestError: the text is no UTF-8.
        """
        return self._requests.tokenize(text, has_special_tokens=not add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of a token id, or of several in any form that a prompt can have."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else [int(token) for token in ids]
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, requests: Any, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several lists of token ids."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in requests]

    def convert_ids_to_tokens(self, token_ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each; None for an id without one."""
        if isinstance(token_ids, int):
            return self.tokenizer.id_to_token(token_ids)
        return [self.tokenizer.id_to_token(int(token)) for token in token_ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each; None for a token that is not there."""
        if isinstance(tokens, str):
            return self.tokenizer.token_to_id(tokens)
        return [self.tokenizer.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Conversation,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        chat_template: str | Path | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """The prompt of a conversation: its text, or, with `tokenize`, its token ids.

        Args:
            conversation: messages, each a dict with `role` and `content`.
            tokenize: give token ids.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end where the last message does; see `LLM.chat`.
            chat_template: another template, or the name of one; see `LLM.chat`.
            tools: that the assistant may call; see `LLM.chat`.
            options: further variables of the template.
        Raises:
            RequestError: the engine has no chat template, or it refuses the messages.
        """
        text = render_chat(
            self._core.chat_template(),
            conversation,
            add_generation_prompt,
            tools,
            options,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
