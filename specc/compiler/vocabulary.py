"""Which tokens of two tokenizers are the same: by the bytes that they stand for, and by role.

Names of tokens say little. A byte-level vocabulary (GPT-2's) writes each byte as a letter of an
alphabet of its own, `Ġthe` and `Ã¤`; one of SentencePiece writes a space as ▁ and what has no piece
as bytes, `▁the` and `<0xC3>`. So ordinary tokens are compared by the bytes that they decode to
within a text, and special ones by what the configurations say that they are for: the text of a
special token is never in an output, and an ordinary token may have the same. Special tokens of no
such role, as those around the turns of a chat, are compared with each other, by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.artifact.special_tokens import of_checkpoint
from specc.errors import VocabMismatchError
from specc.passes.frontend import hf_model
from specc.speculation.vocabulary_map import VocabularyMap
from specc.system.json_file import read_json

# of the tokens of the smaller vocabulary, the share that has to be in both, and the one below
# which a draft proposes so little that the user should know
LEAST_SHARE, LOW_SHARE = 0.05, 0.25
# in the order in which they decide, where one token has several: what a draft proposes that both
# begins and ends texts ends one, and where it is read it begins one
BOS, EOS, UNK = "bos", "eos", "unk"
_PROPOSED, _READ = (EOS, BOS, UNK), (BOS, EOS, UNK)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
_NEEDED = "a tokenizer whose tokens are bytes (ByteLevel) or pieces of SentencePiece"
_DO = "choose a draft of the target's family"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Args:
        texts: id → bytes of ordinary tokens, within a text.
        single_bytes: of these ids, the pieces that stand for a byte of what has no piece.
        roles: role → ids of special tokens.
        num_tokens: special ones included.
        others: name → id of special tokens of no role.
    """

    source: str
    texts: Mapping[int, bytes]
    single_bytes: frozenset[int]
    roles: Mapping[str, tuple[int, ...]]
    num_tokens: int
    others: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, config: Any) -> Vocabulary:
        """Read a tokenizer.json and, beside it, what its special tokens are for.

        Args:
            config: of the model, or None.
        Raises:
            VocabMismatchError: no JSON, or tokens that specc knows no bytes of.
        """
        data = read_json(file, VocabMismatchError, "a tokenizer.json", "save the tokenizer again")
        try:
            added = {
                item["id"]: (item["content"], item["special"]) for item in data["added_tokens"]
            }
            names = dict(_tokens(data["model"]))
            decode = _decoder(data, str(file))
            roles = _roles(file, config, data["model"], names | _names(added))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise VocabMismatchError(
                f"{file}: a tokenizer without {error}", _NEEDED, _DO
            ) from error
        special = {i for i, (_, is_special) in added.items() if is_special}
        special.update(i for ids in roles.values() for i in ids)
        # the library decodes added tokens as it does others
        names |= _names(added)
        found = {i: decode(name) for i, name in sorted(names.items()) if i not in special}
        texts = {i: text for i, (text, _) in found.items() if text}
        single = [i for i, (_, is_byte) in found.items() if is_byte]
        in_roles = {i for ids in roles.values() for i in ids}
        others = {names[i]: i for i in sorted(special - in_roles)}
        return cls(str(file), texts, frozenset(single), roles, len(names), others)


def match(target: Vocabulary, draft: Vocabulary) -> tuple[VocabularyMap, list[str]]:
    """Pair the tokens of two vocabularies; returns also what the user should know.

    A draft id stands for one target id: the one with the same bytes, of the same kind (a piece, or
    a single byte of what has no piece) where there are both. A target id that the draft lacks is
    read as the longest token that its bytes end with: what comes next depends on the last bytes
    most, and each position of the draft's cache takes one token.

    Raises:
        VocabMismatchError: too few tokens are in both.
    """
    owns = _by_bytes(draft)
    targets = _by_bytes(target)
    from_draft: dict[int, list[int]] = defaultdict(list)
    for own, text in draft.texts.items():
        if text in targets:
            from_draft[_alike(target, targets[text], own in draft.single_bytes)].append(own)
    num_shared = len(from_draft)
    _check_share(num_shared, target, draft)
    # the one that a draft's own tokenizer emits comes first
    for ids in from_draft.values():
        ids.sort(key=lambda own: (own in draft.single_bytes, own))
    done: set[int] = set()
    for role in _PROPOSED:
        ids = [own for own in draft.roles.get(role, ()) if own not in done]
        if ids and target.roles.get(role):
            from_draft[target.roles[role][0]] += ids
            done.update(ids)
    same = {
        target.others[name]: draft.others[name] for name in target.others if name in draft.others
    }
    for index, own in same.items():
        from_draft[index] = [own]
    to_draft, unread = dict(same), 0
    unknown = next((draft.roles[role][0] for role in (UNK, EOS, BOS) if draft.roles.get(role)), 0)
    for index, text in target.texts.items():
        if text not in owns:
            unread += 1
        end = next((text[n:] for n in range(len(text)) if text[n:] in owns), None)
        is_byte = index in target.single_bytes
        to_draft[index] = unknown if end is None else _alike(draft, owns[end], is_byte)
    for role in reversed(_READ):
        if draft.roles.get(role):
            to_draft |= dict.fromkeys(target.roles.get(role, ()), draft.roles[role][0])
    unread += target.num_tokens - len(to_draft)
    found = VocabularyMap(
        to_draft,
        {i: tuple(ids) for i, ids in from_draft.items()},
        target.num_tokens,
        unread,
        unknown,
    )
    return found, _told(found, num_shared, target, draft)


def _told(
    found: VocabularyMap, num_shared: int, target: Vocabulary, draft: Vocabulary
) -> list[str]:
    share = num_shared / min(len(target.texts), len(draft.texts))
    few = f"; that is {share:.0%} of the smaller vocabulary, so expect little" * (share < LOW_SHARE)
    return [
        f"{draft.source} has other tokens than {target.source}: the draft proposes"
        f" {found.num_proposed} of {found.num_target} target ids, and reads {found.num_unread} as"
        f" another token{few}. Outputs stay the target's"
    ]


def _check_share(num_shared: int, target: Vocabulary, draft: Vocabulary) -> None:
    fewer = min(len(target.texts), len(draft.texts))
    if fewer and num_shared >= LEAST_SHARE * fewer:
        return
    raise VocabMismatchError(
        f"{num_shared} of {len(target.texts)} tokens of {target.source} among the"
        f" {len(draft.texts)} of {draft.source}",
        f"{LEAST_SHARE:.0%} of the smaller vocabulary in both: a draft proposes no other tokens",
        "choose a draft whose tokenizer is nearer to the target's",
    )


def _by_bytes(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = defaultdict(list)
    for index, text in vocabulary.texts.items():
        found[text].append(index)
    return dict(found)


def _alike(vocabulary: Vocabulary, ids: list[int], is_byte: bool) -> int:
    """Of ids of one text, the first of this kind; else a piece before a single byte."""
    single = vocabulary.single_bytes
    return min(ids, key=lambda index: ((index in single) != is_byte, index in single, index))


def _tokens(model: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Ids and names; of Unigram, a list of names and scores."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        yield from ((index, str(name)) for index, (name, _) in enumerate(vocab))
    else:
        yield from ((int(index), str(name)) for name, index in vocab.items())


def _names(added: Mapping[int, tuple[str, bool]]) -> dict[int, str]:
    return {index: text for index, (text, _) in added.items()}


def _decoder(data: Mapping[str, Any], source: str) -> Any:
    """What gives the bytes of a name, and whether it is a piece of one byte."""
    model = data["model"]
    parts = [*_parts(data.get("decoder")), *_parts(data.get("pre_tokenizer"))]
    kinds = {part["type"] for part in parts}
    marks = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    if model.get("type") not in (None, "BPE", "Unigram") or any(marks):
        kinds = set()
    if "ByteLevel" in kinds:
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        return lambda name: _from_letters(name, letters)
    spaces = [s for part in parts if (s := _space_sign(part)) is not None]
    if not spaces and "ByteFallback" not in kinds:
        raise VocabMismatchError(
            f"{source}, whose tokens are other ones than those of the target, and a"
            f" {model.get('type', 'nameless')} model without bytes or the sign {_SPACE}",
            _NEEDED,
            _DO,
        )
    has_bytes = "ByteFallback" in kinds or bool(model.get("byte_fallback"))
    return lambda name: _from_piece(name, spaces[0] if spaces else _SPACE, has_bytes)


def byte_letters() -> list[str]:
    """The letter that GPT-2's alphabet has for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _from_letters(name: str, letters: Mapping[str, int]) -> tuple[bytes, bool]:
    if any(letter not in letters for letter in name):
        return name.encode(), False
    return bytes(letters[letter] for letter in name), False


def _from_piece(name: str, space: str, has_bytes: bool) -> tuple[bytes, bool]:
    if has_bytes and (found := _BYTE.fullmatch(name)):
        return bytes((int(found[1], 16),)), True
    return name.replace(space, " ").encode(), False


def _parts(stage: Any) -> list[Mapping[str, Any]]:
    """A decoder or pre-tokenizer, or those that it is a sequence of."""
    if stage is None:
        return []
    inner = stage.get("decoders") or stage.get("pretokenizers")
    return [part for item in inner for part in _parts(item)] if inner else [stage]


def _space_sign(part: Mapping[str, Any]) -> str | None:
    """The sign that a part turns into a space."""
    if part["type"] == "Metaspace":
        return str(part.get("replacement", _SPACE))
    pattern = part.get("pattern")
    is_space = part["type"] == "Replace" and part.get("content") == " "
    if is_space and isinstance(pattern, dict) and "String" in pattern:
        return str(pattern["String"])
    return None


def _roles(
    file: Path, config: Any, model: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, tuple[int, ...]]:
    """What the checkpoint's files say that special tokens are for; a role may have no token."""
    ids = {name: index for index, name in names.items()}

    special = of_checkpoint(file.parent)

    def named(key: str) -> list[int]:
        return [ids[special[key]]] if special.get(key) in ids else []

    bos = getattr(config, "bos_token_id", None)
    unk = model.get("unk_id") if model.get("unk_token") is None else ids.get(model["unk_token"])
    found = {
        BOS: [*named("bos_token"), *([bos] if isinstance(bos, int) else [])],
        # where texts may end in several ways, the tokenizer's own is the usual one
        EOS: [*named("eos_token"), *hf_model.eos_token_ids(file.parent, config)],
        UNK: [*named("unk_token"), *([unk] if isinstance(unk, int) else [])],
    }
    found[UNK] = [i for i in found[UNK] if i not in (*found[BOS], *found[EOS])]
    return {
        role: tuple(dict.fromkeys(i for i in held if i in names)) for role, held in found.items()
    }
