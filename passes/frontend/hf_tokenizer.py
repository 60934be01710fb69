"""The tokenizer as transformers loads it: what an engine's own token ids are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specc.passes.frontend.hf_model import quiet_transformers

# what tells transformers which class to load
_NAMES = ("tokenizer_config.json", "config.json")
# an option of transformers that its errors advise
_ASKS_FOR_CODE = "trust_remote_code"


class HfTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: as `AutoTokenizer` loaded it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> HfTokenizer | None:
        """Load the tokenizer of a checkpoint; None where the directory does not say its class.

        Raises:
            ValueError: transformers cannot load it, or would have to run code of the checkpoint.
        """
        if not any((directory / name).is_file() for name in _NAMES):
            return None
        from transformers import AutoTokenizer

        try:
            with quiet_transformers():
                loaded = AutoTokenizer.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # a malformed file fails in many ways, in several libraries
            raise ValueError(_first_line(error)) from error
        return cls(loaded)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            ValueError: the class that transformers chose does not fit the vocabulary.
        """
        try:
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:  # of the tokenizers library, which raises nothing narrower
            raise ValueError(_first_line(error)) from error

    def chat(self, messages: list[dict[str, Any]], is_open: bool) -> list[int]:
        """Token ids of a chat by the template of the checkpoint.

        Args:
            messages: each with a role and a content.
            is_open: the next thing that is said is the model's.
        Raises:
            ValueError: there is no template, or it does not take these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_open
            )
        except Exception as error:  # of templates, which raise whatever they like
            raise ValueError(_first_line(error)) from error
        return self.encode(text, add_special_tokens=False)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Name → text, as chat templates get them: `bos_token`, `image_token`, …"""
        given = self._tokenizer.special_tokens_map
        return {name: text for name, text in given.items() if isinstance(text, str)}

    @property
    def post_processor(self) -> Any:
        """What adds special tokens, in the form of tokenizer.json; None where it is Python code."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        made = getattr(backend, "post_processor", None)
        # its own part alone: to write all of a large tokenizer takes seconds
        return None if made is None else json.loads(made.__getstate__())


def _first_line(error: Exception) -> str:
    if _ASKS_FOR_CODE in str(error):
        # nobody can give it that here
        return "its tokenizer is code of the checkpoint, which is not run"
    return (str(error).strip() or repr(error)).splitlines()[0]
