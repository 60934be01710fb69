"""Which tokens of a text a draft of other tokens can propose, from an engine's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.artifact.safetensors_io import SafetensorsReader
from specc.speculation.vocabulary_map import LACKING
from specc.system.json_file import read_engine_json

_AGAIN = "compile or copy the engine again"


def token_ids(directory: Path, manifest: Manifest, texts: Sequence[str | list[int]]) -> list[int]:
    """Ids of all texts, one after the other, without what a tokenizer puts around them.

    Args:
        directory: engine, which has a tokenizer where one of the texts is no list of ids.
        texts: prompts.
    """
    file, ids = manifest.tokenizer.file, []
    tokenizer = Tokenizer.from_file(str(directory / file)) if file else None
    for text in texts:
        if not isinstance(text, str):
            ids += text
        elif tokenizer is not None:
            ids += tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def lacking(directory: Path, manifest: Manifest, model: ModelEntry) -> Tensor:
    """[V] bool: target ids that a draft of other tokens never proposes.

    Raises:
        EngineError: its program cannot be read.
        WeightError: its weights cannot be.
    """
    program = read_engine_json(directory / model.program_file, "a program", _AGAIN)
    key = next(item["key"] for item in program["inputs"] if item["name"] == LACKING)
    with SafetensorsReader(directory / manifest.weights_file(model)) as reader:
        data = b"".join(bytes(chunk) for chunk in reader.read_chunks(key))
    return torch.frombuffer(bytearray(data), dtype=torch.bool)
