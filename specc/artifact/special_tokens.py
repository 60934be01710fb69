"""Special tokens by the names that chat templates have for them, `bos_token` and the like.

An engine's special_tokens_map.json is what transformers said of its tokenizer when it was compiled:
checkpoints have these tokens in up to three files, and classes of tokenizers have some of their
own. Engines without that file, and checkpoints that transformers cannot load, are read here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.errors import ConfigError
from specc.system.json_file import read_json

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
# bytes of either file
MAX_BYTES = 64 << 20


def of_engine(directory: Path) -> dict[str, str]:
    """Name → text, of an engine's tokenizer.

    Raises:
        ConfigError: a file that is no JSON.
    """
    named = read_object(directory / MAP_FILE)
    return _named((read_object(directory / CONFIG_FILE) or {}) if named is None else named)


def of_checkpoint(directory: Path) -> dict[str, str]:
    """Name → text, as the files of a checkpoint say it, the later ones; classes know more.

    A file that cannot be read says nothing: whoever needs it for more complains.
    """
    parts: list[dict[str, Any]] = []
    for name in (CONFIG_FILE, MAP_FILE):
        with contextlib.suppress(ConfigError):
            parts.append(read_object(directory / name) or {})
    # as with transformers: a map is of before configurations had all tokens
    if parts and "added_tokens_decoder" in parts[0]:
        del parts[1:]
    return {name: text for part in parts for name, text in _named(part).items()}


def read_object(file: Path) -> dict[str, Any] | None:
    """What a JSON file of a tokenizer holds; None where there is no such file, or no object in it.

    Raises:
        ConfigError: it is no JSON, or too large.
    """
    if not file.is_file():
        return None
    needed, do = "the tokenizer's configuration", "correct the file"
    found = read_json(file, ConfigError, needed, do, max_bytes=MAX_BYTES)
    return found if isinstance(found, dict) else None


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    given = {name: value for name, value in config.items() if name.endswith("_token")}
    given |= extra if isinstance(extra, dict) else {}
    texts = {name: _text(value) for name, value in given.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
