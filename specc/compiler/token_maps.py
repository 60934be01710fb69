"""Token maps: whether two tokenizers give every id the same meaning."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from specc.errors import VocabMismatchError


@dataclass(frozen=True)
class TokenMap:
    """Ids and their tokens, special tokens included."""

    source: str
    tokens: dict[int, str]

    @classmethod
    def from_file(cls, path: Path) -> TokenMap:
        """Read a tokenizer.json.

        Raises:
            VocabMismatchError: the file is missing or not a tokenizer.
        """
        from tokenizers import Tokenizer

        needed = "a tokenizer.json that the tokenizers library reads"
        if not path.is_file():
            raise VocabMismatchError(
                f"{path}: no such file",
                needed,
                "save the tokenizer with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise VocabMismatchError(
                f"{path}: {error}", needed, "save the tokenizer again"
            ) from error
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        return cls(str(path), {index: token for token, index in vocab.items()})

    def sha256(self) -> str:
        """Hash of the map, independent of file layout."""
        items = json.dumps(sorted(self.tokens.items()), ensure_ascii=True)
        return hashlib.sha256(items.encode()).hexdigest()

    def require_same(self, draft: TokenMap) -> list[str]:
        """Compare with a draft's map; returns warnings.

        Ids that only one of the two has are padding or additions at the end: allowed, with a
        warning where the draft lacks some of the target's tokens.

        Raises:
            VocabMismatchError: an id means different tokens, the first of which is named, or no
                id is in both maps.
        """
        common = sorted(self.tokens.keys() & draft.tokens.keys())
        if not common:
            raise VocabMismatchError(
                f"no id is in both {self._example()} and {draft._example()}",
                "one token map: acceptance compares token ids",
                "choose a draft of the target's family",
            )
        for index in common:
            if self.tokens[index] != draft.tokens[index]:
                raise VocabMismatchError(
                    f"token {index} is {self.tokens[index]!r} in {self.source}"
                    f" and {draft.tokens[index]!r} in {draft.source}",
                    "one token map: acceptance compares token ids",
                    "choose a draft of the target's family",
                )
        missing = sorted(self.tokens.keys() - draft.tokens.keys())
        if not missing:
            return []
        return [
            f"the draft lacks {len(missing)} of the target's tokens (first: {missing[0]},"
            f" {self.tokens[missing[0]]!r}): it never proposes them"
        ]

    def _example(self) -> str:
        if not self.tokens:
            return f"{self.source} (which has no tokens)"
        index = min(self.tokens)
        return f"{self.source} (token {index} is {self.tokens[index]!r})"
