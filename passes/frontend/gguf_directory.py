"""A GGUF file alone as a directory of a model: what lies beside it is made from its own fields.

The directory is in the user's cache, named after the file's place, size and time, and holds
config.json, tokenizer.json, tokenizer_config.json, generation_config.json and a link to the file,
or to each of its parts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specc.artifact.decoders import (
    gguf_architectures,
    gguf_hybrid_architectures,
    gguf_names,
    gguf_older_architectures,
)
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.decoders.gguf_parts import part_name
from specc.errors import ModelNotFoundError
from specc.passes.frontend import (
    gguf_config,
    gguf_ends,
    gguf_fields,
    gguf_hybrids,
    gguf_models,
    gguf_rotary,
    gguf_splits,
    gguf_tokenizer,
)
from specc.system.file_cache import FileCache

GENERATION = "generation_config.json"
# where converters keep what a checkpoint's file of that name says
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

# `tokenizer.ggml.…_token_id` → the name of the token that transformers has, in llama.cpp's spelling
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "seperator": "sep",
    "padding": "pad",
    "cls": "cls",
    "mask": "mask",
}
# what the files of the directory depend on
_CODE = (
    gguf_architectures,
    gguf_config,
    gguf_ends,
    gguf_fields,
    gguf_hybrid_architectures,
    gguf_hybrids,
    gguf_models,
    gguf_names,
    gguf_older_architectures,
    gguf_rotary,
    gguf_splits,
    gguf_tokenizer,
    sys.modules[__name__],
)
# token_type of what stands in no text: unknown, control
_NO_TEXT = (2, 3)


def directory_of(file: Path) -> Path:
    """The directory of a GGUF file's model; made where the cache has none.

    Args:
        file: of the model, or any of its parts.
    Raises:
        WeightError: the file is malformed, or its fields say something that is not read.
        VocabMismatchError: its tokenizer is not read.
        ModelNotFoundError: the cache cannot hold a link.
        CompilerError: the cache cannot be written.
    """
    # found by their names, which files of a cache of downloads have as links alone
    named, cache = _files(file.absolute()), FileCache()
    files = [part.resolve() for part in named]
    name = f"gguf/{_key(files)}"
    contents: dict[str, bytes] = {}

    def content(part: str) -> bytes:
        if not contents:
            contents.update(_contents(named[0]))
        return contents[part]

    for part in ("config.json", "tokenizer.json", "tokenizer_config.json", GENERATION):

        def make(scratch: Path, part: str = part) -> Path:
            made = scratch / part
            made.write_bytes(content(part))
            return made

        cache.obtain(f"{name}/{part}", make)
    directory = cache.path(name)
    for number, source in enumerate(files):
        own = part_name("model", number, len(files)) if len(files) > 1 else "model.gguf"
        _link(directory / own, source)
    return directory


def _files(file: Path) -> list[Path]:
    """The file, or all parts of it."""
    reader = GGUFReader(file)
    reader.close()
    return reader.files


def _key(files: Sequence[Path]) -> str:
    """Of the files, and of the code that reads them."""
    key = hashlib.sha256()
    for module in _CODE:
        key.update(Path(str(module.__file__)).read_bytes())
    for part in files:
        state = part.stat()
        key.update(f"\0{part}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return key.hexdigest()[:24]


def _link(link: Path, file: Path) -> None:
    try:
        link.symlink_to(file)
    except FileExistsError:
        pass
    except OSError as error:
        raise ModelNotFoundError(
            f"{link}: {error.strerror or error}",
            "a cache that can hold a link to a GGUF file",
            "put the file in a directory with config.json and tokenizer.json, and pass that",
        ) from error


def _contents(file: Path) -> dict[str, bytes]:
    reader = GGUFReader(file, reads_lists=True)
    try:
        config = gguf_config.config_of(reader)
        tokenizer = gguf_tokenizer.tokenizer_of(reader.fields, reader.location())
    finally:
        reader.close()
    return {
        "config.json": json.dumps(config, indent=2).encode(),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(_tokenizer_config(reader.fields), indent=2).encode(),
        GENERATION: json.dumps(_generation_config(reader.fields), indent=2).encode(),
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers and chats read: the tokenizer as it is, special tokens, the template."""
    tokens = fields["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    types = fields.get("tokenizer.ggml.token_type") or ()
    for part, name in _SPECIAL.items():
        number = fields.get(f"tokenizer.ggml.{part}_token_id")
        if type(number) is not int or not 0 <= number < len(tokens):
            continue
        # a word of the language may fill a batch up; texts still have it
        if part in ("bos", "eos") or (number < len(types) and types[number] in _NO_TEXT):
            found[f"{name}_token"] = tokens[number]
    templates = _chat_templates(fields)
    if list(templates) == ["default"]:
        found["chat_template"] = templates["default"]
    elif templates:
        named = templates.items()
        found["chat_template"] = [{"name": name, "template": text} for name, text in named]
    return found


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling that its makers advise, as they wrote it: numbers are float32 in the file."""
    found = {own: fields.get(f"general.sampling.{name}") for name, own in _SAMPLING.items()}
    return {
        own: float(f"{value:.7g}") if isinstance(value, float) else value
        for own, value in found.items()
        if value is not None
    }


def _chat_templates(fields: dict[str, Any]) -> dict[str, str]:
    """Name → template. A file with several has one field for each, besides that of the default."""
    field = "tokenizer.chat_template"
    given = {"default": fields.get(field)}
    given |= {
        k.removeprefix(f"{field}."): v for k, v in fields.items() if k.startswith(f"{field}.")
    }
    return {name: text for name, text in given.items() if isinstance(text, str)}
