"""What `--calibration` asks for: texts as windows of token ids, and the phase that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from specc.artifact.quantized_layout import QuantizedLayout
from specc.compiler.context import CompileContext
from specc.compiler.phases import CALIBRATION
from specc.errors import InputFileError
from specc.passes.frontend.model_source import ModelSource
from specc.passes.pipeline import Phases
from specc.passes.quantize.calibrate import Calibrate
from specc.progress import Advance
from specc.system.json_file import JsonError, parse_json

# tokens of a window, and windows that are read at most: 16,384 tokens
_WINDOW, _MOST_WINDOWS = 512, 32
_FORM = 'a line such as {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}'
_DO = "correct the file"


def calibration_windows(
    path: Path, tokenizer: bytes, first: int | None, vocab_size: int | None, max_seq_len: int
) -> tuple[list[int], ...]:
    """Windows of the texts of a file, from all over it.

    Args:
        path: UTF-8 text, or JSON lines.
        tokenizer: content of tokenizer.json; empty where there is none.
        first: token that texts begin with, or None.
        vocab_size: of the target, where its configuration says it.
        max_seq_len: tokens of a window at most.
    Raises:
        InputFileError: it cannot be read, holds no texts of two tokens, or ids that are none.
    """
    texts = _read_texts(path)
    if not tokenizer and any(isinstance(text, str) for text in texts):
        raise InputFileError(
            f"{path}: text, and a target without a tokenizer",
            "token ids",
            'write lines such as {"prompt_token_ids": [1, 2, 3]}',
        )
    encode = Tokenizer.from_buffer(tokenizer).encode if tokenizer else None
    begin = [] if first is None else [first]
    step = max(1, min(_WINDOW, max_seq_len) - len(begin))
    windows: list[list[int]] = []
    for text in texts:
        if isinstance(text, str):
            assert encode is not None
            ids = encode(text, add_special_tokens=False).ids
        else:
            ids = list(text)
        if any(token < 0 or (vocab_size and token >= vocab_size) for token in ids):
            raise InputFileError(f"{path}: token ids that are none of the target's", _FORM, _DO)
        cut = [begin + ids[place : place + step] for place in range(0, len(ids), step)]
        windows += [window for window in cut if len(window) > 1]
    if not windows:
        raise InputFileError(f"{path}: no text of two tokens", "texts of the kind to expect", _DO)
    count = min(len(windows), _MOST_WINDOWS)
    return tuple(windows[number * len(windows) // count] for number in range(count))


def calibration_phases(context: CompileContext, source: ModelSource, advance: Advance) -> Phases:
    """The phase that rounds a target for the texts; none where there are no texts."""
    layout = context.quantization
    if not context.windows or layout is None:
        return ()
    named = QuantizedLayout.named(layout)
    return ((CALIBRATION, (partial(Calibrate, source, named, context.windows, advance),)),)


def _read_texts(path: Path) -> list[str | Sequence[int]]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputFileError(
            f"{path}: {error.strerror}", "a readable text file", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"{path}: byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8",
            "UTF-8 text",
            "convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
    if path.suffix != ".jsonl":
        return [text]
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [_read_line(f"{path}, line {number}", line) for number, line in lines]


def _read_line(place: str, line: str) -> str | Sequence[int]:
    try:
        value = parse_json(line)
    except JsonError as error:
        raise InputFileError(f"{place}: no JSON ({error})", _FORM, _DO) from error
    if isinstance(value, dict) and isinstance(text := value.get("prompt"), str):
        return text
    ids = value.get("prompt_token_ids") if isinstance(value, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InputFileError(f"{place}: neither text nor token ids", _FORM, _DO)
    return ids
