"""Tokenizers and drafts whose ids mean other tokens than a target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specc.compiler.vocabulary import byte_letters
from tests.models import VOCAB, build_model, byte_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>")
# rows of the planted draft that no token has
PADDING = 5
# tokens of which the planted draft has a single byte, too
TWICE = (5, 17)


def byte_level(tokens: Sequence[bytes], special: Sequence[str] = ()) -> Tokenizer:
    """GPT-2's kind: names are letters of the byte alphabet; special tokens follow."""
    letters = byte_letters()
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def sentencepiece(
    names: Sequence[str], special: Sequence[str] = SPECIAL, unk: str | None = "<unk>"
) -> Tokenizer:
    """Llama's kind: special tokens, then pieces with ▁ for a space, and bytes as `<0xE4>`."""
    vocab = {name: i for i, name in enumerate((*special, *names))}
    known = {"unk_token": unk} if unk in special else {}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, **known))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def save(directory: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """A directory with a tokenizer and its tokenizer_config.json; returns tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "tokenizer.json"
    tokenizer.save(str(file))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return file


def piece_of(letter: str) -> str:
    """The name that SentencePiece has for the byte of a letter of the byte alphabet."""
    byte = byte_letters().index(letter)
    if byte == ord(" "):
        return "▁"
    return chr(byte) if ord("!") <= byte <= ord("~") else f"<0x{byte:02X}>"


def save_planted(
    name: str, directory: Path, seed: int = 0, noise: float = 0.0, **changes: Any
) -> Path:
    """The tiny model of this name with Llama's kind of tokenizer: same numbers, other ids.

    Ids are shuffled and follow special ones; two tokens have a second id, of a single byte; rows
    of padding and special tokens would win against every other one.
    """
    names = [piece_of(byte_tokenizer().id_to_token(i)) for i in range(VOCAB)]
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(11)).tolist()
    twice = [f"<0x{ord(names[i]):02X}>" for i in TWICE]
    tokenizer = sentencepiece([*(names[i] for i in order), *twice])
    first = len(SPECIAL)
    # row of the target for each own row; -1: of no token
    rows = [-1] * first + order + list(TWICE) + [-1] * PADDING
    plain = build_model(name, seed, noise, **changes)
    model = build_model(name, seed, vocab_size=len(rows), **changes)
    state = dict(plain.state_dict())
    for key in [key for key, value in state.items() if value.shape[:1] == (VOCAB,)]:
        old = state[key]
        state[key] = torch.stack(
            [old[row] if row >= 0 else 3 * old[i % VOCAB] for i, row in enumerate(rows)]
        )
    model.load_state_dict(state)
    model.save_pretrained(directory)
    save(directory, tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return directory
