"""The tokenizer part of a compilation: the token maps of all models, and transformers' own ids.

An engine tokenizes with tokenizer.json alone. Transformers may add other special tokens than that
file says, for example because tokenizer_config.json has `add_bos_token`; so both are asked, and
where they differ in the special tokens, the engine gets those of transformers. It also gets the
names of special tokens: transformers reads them from several files, and its classes have more. An
output ends at the tokens of generation_config.json or config.json, and, as in vLLM, at the
tokenizer's own.
"""

from __future__ import annotations

import filecmp
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specc.artifact.manifest_entries import TokenizerEntry
from specc.artifact.special_tokens import of_checkpoint
from specc.compiler.candidate import Candidate
from specc.compiler.vocabulary import Vocabulary, match
from specc.errors import VocabMismatchError
from specc.passes.frontend import hf_model
from specc.passes.frontend.hf_tokenizer import HfTokenizer
from specc.speculation.vocabulary_map import VocabularyMap

TOKENIZER_FILE = "tokenizer.json"
_TEXTS = (
    "",
    "a",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces,\ttabs\n\nand lines\r\n",
    "Grüße, 世界, дом, 🙂",
    "def f(x):\n    return x[1234:567] != 8.9e-10",
)
# special tokens that a text may hold
_MOST_SPECIAL = 4
_SHOWN_IDS = 8


@dataclass
class TokenizerFiles:
    """The tokenizer of an engine.

    Args:
        file: where it was read; None where the engine takes token ids only.
        data: content of the engine's file.
        warnings: what the user should know.
        maps: draft → which of its ids stand for the target's, where they are other ones.
        special_tokens: name → text, for chat templates.
    """

    entry: TokenizerEntry
    file: Path | None = None
    data: bytes = b""
    warnings: list[str] = field(default_factory=list)
    maps: dict[str, VocabularyMap] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)


def check_tokenizers(models: Sequence[Candidate], tokenizer: str | Path | None) -> TokenizerFiles:
    """Compare the token maps of all models, and the target's ids with those of transformers.

    Args:
        models: the target first.
        tokenizer: directory or tokenizer.json, where the target is a module.
    Raises:
        VocabMismatchError: no tokenizer, or a draft that has too few of the target's tokens.
    """
    target = models[0]
    file = Path(tokenizer) if tokenizer else None
    if file is None and target.directory is not None:
        file = target.directory
    if file is not None and file.is_dir():
        file = file / TOKENIZER_FILE
    directory = file.parent if file else None
    eos = tuple(hf_model.eos_token_ids(directory, target.config))
    if file is None:
        empty = hashlib.sha256(b"").hexdigest()
        return TokenizerFiles(TokenizerEntry(None, empty, eos, None, False))
    target_map = TokenMap.from_file(file)
    warnings, maps = [], {}
    for model in models[1:]:
        if model.directory is None or model.head is not None:
            # a head has the ids of its target
            continue
        draft_file = model.directory / TOKENIZER_FILE
        if draft_file.is_file() and filecmp.cmp(file, draft_file, shallow=False):
            # drafts of a family mostly have the very file
            continue
        draft_map = TokenMap.from_file(draft_file)
        if target_map.first_difference(draft_map) is None:
            warnings += target_map.require_same(draft_map)
        else:
            own = Vocabulary.read(file, target.config)
            maps[model.name], told = match(own, Vocabulary.read(draft_file, model.config))
            warnings += told
    data, said, special = follow_transformers(file)
    own_eos = target_map.id_of(special.get("eos_token"))
    more = () if own_eos is None or own_eos in eos else (own_eos,)
    said += _about_ends(eos, more, target_map)
    bos = getattr(target.config, "bos_token_id", None)
    # an empty text becomes what the tokenizer puts around every text
    begins = _read(data).encode("").ids[:1]
    _read.cache_clear()
    entry = TokenizerEntry(
        file.name,
        target_map.sha256(),
        (*eos, *more),
        bos,
        bos is not None and begins == [bos],
        more,
    )
    return TokenizerFiles(entry, file, data, warnings + said, maps, special)


def follow_transformers(file: Path) -> tuple[bytes, list[str], dict[str, str]]:
    """A tokenizer.json that gives the ids of transformers, where post-processing is all it takes.

    Args:
        file: tokenizer.json, with the checkpoint's other files beside it.
    Returns:
        its content, changed where need be, warnings, and special tokens by name.
    """
    data, special = file.read_bytes(), of_checkpoint(file.parent)
    if file.name != TOKENIZER_FILE:
        return data, [], special
    try:
        reference = HfTokenizer.load(file.parent)
        if reference is None:
            return data, [], special
        special = reference.special_tokens
        return *_follow(reference, file, data), special
    except ValueError as error:
        said = (
            f"transformers cannot use the tokenizer of {file.parent} ({error}); the engine takes"
            f" {file.name}, and its ids were compared with nothing"
        )
        return data, [said], special


def _about_ends(eos: Sequence[int], more: Sequence[int], tokens: TokenMap) -> list[str]:
    """What a user should know of where outputs end.

    Args:
        eos: tokens that generation_config.json or config.json names.
        more: those that the tokenizer alone names.
    """
    if not more:
        return []
    named = ", ".join(f"{i} ({tokens.tokens.get(i)!r})" for i in eos) or "none"
    return [
        f"the tokenizer ends texts with token {more[0]} ({tokens.tokens[more[0]]!r}), which"
        f" generation_config.json and config.json do not name (they name {named}): outputs end"
        " there, too, as in vLLM; transformers' generate goes on"
    ]


def _follow(reference: HfTokenizer, file: Path, data: bytes) -> tuple[bytes, list[str]]:
    own = _read(data)
    texts = [*_TEXTS, *_special_texts(own)]
    differs = _first_difference(own, reference, texts, add_special_tokens=False)
    if differs is not None:
        return data, [
            f"transformers splits {differs} in another way than {file}, which the engine takes;"
            " if the model was trained with transformers' ids, save the tokenizer again with"
            " AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        ]
    differs = _first_difference(own, reference, texts, add_special_tokens=True)
    if differs is None:
        return data, []
    changed = json.dumps(
        json.loads(data) | {"post_processor": reference.post_processor}, ensure_ascii=False
    ).encode()
    if _first_difference(_read(changed), reference, texts, add_special_tokens=True) is not None:
        return data, [
            f"transformers puts other special tokens around {differs} than {file}, which the engine"
            " takes; pass token ids where that matters"
        ]
    return changed, [
        f"transformers puts other special tokens around {differs} than {file}; the engine does as"
        " transformers does"
    ]


# the largest files take seconds
@functools.lru_cache(maxsize=2)
def _read(data: bytes) -> Any:
    """The tokenizer as the runtime reads it."""
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_texts(tokenizer: Any) -> list[str]:
    added = tokenizer.get_added_tokens_decoder()
    special = [token.content for _, token in sorted(added.items()) if token.special]
    return [f"{text} and {text}more" for text in special[:_MOST_SPECIAL]]


def _first_difference(
    own: Any, reference: HfTokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> str | None:
    """The first text that has other ids, with both; None where all are equal."""
    for text in texts:
        mine = own.encode(text, add_special_tokens=add_special_tokens).ids
        theirs = reference.encode(text, add_special_tokens)
        if mine != theirs:
            return f"{text!r} ({_shown(theirs)}, not {_shown(mine)})"
    return None


def _shown(ids: Sequence[int]) -> str:
    more = ", …" if len(ids) > _SHOWN_IDS else ""
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}{more}]"


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
        needed = "a tokenizer.json that the tokenizers library reads"
        if not path.is_file():
            raise VocabMismatchError(
                f"{path}: no such file",
                needed,
                "save the tokenizer with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        try:
            tokenizer = _read(path.read_bytes())
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise VocabMismatchError(
                f"{path}: {error}", needed, "save the tokenizer again"
            ) from error
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        return cls(str(path), {index: token for token, index in vocab.items()})

    def sha256(self) -> str:
        """Hash of the map, independent of file layout."""
        # as json.dumps writes a list of pairs, in a third of its time
        escape = json.encoder.encode_basestring_ascii
        pairs = (f"[{index}, {escape(self.tokens[index])}]" for index in sorted(self.tokens))
        return hashlib.sha256(f"[{', '.join(pairs)}]".encode()).hexdigest()

    def first_difference(self, other: TokenMap) -> int | None:
        """The first id that means different tokens in two maps; None where none does."""
        theirs = other.tokens
        differ = (i for i, token in self.tokens.items() if theirs.get(i, token) != token)
        return min(differ, default=None)

    def id_of(self, token: str | None) -> int | None:
        """Id of a token; None where there is none of this text."""
        return next((index for index, text in self.tokens.items() if text == token), None)

    def require_same(self, draft: TokenMap) -> list[str]:
        """Compare with a draft's map; returns warnings.

        Ids that only one of the two has are padding or additions at the end: allowed, with a
        warning where the draft lacks some of the target's tokens.

        Raises:
            VocabMismatchError: an id means different tokens, the first of which is named, or no
                id is in both maps.
        """
        if not self.tokens.keys() & draft.tokens.keys():
            raise VocabMismatchError(
                f"no id is in both {self._example()} and {draft._example()}",
                "one token map: acceptance compares token ids",
                "choose a draft of the target's family",
            )
        index = self.first_difference(draft)
        if index is not None:
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
