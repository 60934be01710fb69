"""`specc inspect --prompts`: what drafts of other tokens can propose of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor

from specc.artifact.directory import open_engine
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.artifact.safetensors_io import SafetensorsReader
from specc.cli.prompts import needs_ids, plain_prompts
from specc.errors import ConfigError, EngineError, RequestError
from specc.speculation.vocabulary_map import LACKING
from specc.system.json_file import read_json

_AGAIN = "compile or copy the engine again"


def show_coverage(directory: Path, prompts: Path, as_json: bool) -> None:
    """Print the share of the tokens of these prompts that each such draft can propose.

    Args:
        directory: engine.
        prompts: file of JSON lines.
        as_json: one JSON object.
    Raises:
        ConfigError: no draft of other tokens.
        SpeccError: of the engine, or of the file.
    """
    manifest = open_engine(directory)
    drafts = [model for model in manifest.models if model.vocabulary is not None]
    if not drafts:
        raise ConfigError(
            f"--prompts {prompts}, and {directory} without a draft of other tokens",
            "a draft whose tokenizer is not the target's",
            "leave out --prompts: the drafts of this engine propose every token",
        )
    texts = plain_prompts(prompts)
    needs_ids(texts, manifest.tokenizer.file is not None)
    tokens = torch.tensor(_token_ids(directory, manifest, texts), dtype=torch.int64)
    if not len(tokens):
        raise RequestError(f"{prompts}: no token", "texts of one token or more", "write a prompt")
    num_ids = manifest.models[0].vocab_size
    if len(wrong := tokens[(tokens < 0) | (tokens >= num_ids)]):
        raise RequestError(
            f"{prompts}: token id {int(wrong[0])}",
            f"ids from 0 to {num_ids - 1}",
            "correct the file",
        )
    found = {model.name: ~_lacking(directory, manifest, model)[tokens] for model in drafts}
    if as_json:
        shares = {name: is_known.float().mean().item() for name, is_known in found.items()}
        print(json.dumps({"tokens": len(tokens), "proposed": shares}, indent=1))
        return
    for name, is_known in found.items():
        count = int(is_known.sum())
        share = count / len(tokens)
        typer.echo(f"{name} can propose {count} of the {len(tokens)} tokens ({share:.1%})")


def _token_ids(directory: Path, manifest: Manifest, texts: Sequence[str | list[int]]) -> list[int]:
    """Ids of all texts, one after the other, without what a tokenizer puts around them.

    Args:
        directory: engine, which has a tokenizer where one of the texts is no list of ids.
        manifest: of it.
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


def _lacking(directory: Path, manifest: Manifest, model: ModelEntry) -> Tensor:
    """[V] bool: target ids that a draft of other tokens never proposes.

    Raises:
        EngineError: its program cannot be read.
        WeightError: its weights cannot be.
    """
    program = read_json(directory / model.program_file, EngineError, "a program", _AGAIN)
    key = next(item["key"] for item in program["inputs"] if item["name"] == LACKING)
    with SafetensorsReader(directory / manifest.weights_file(model)) as reader:
        data = b"".join(bytes(chunk) for chunk in reader.read_chunks(key))
    return torch.frombuffer(bytearray(data), dtype=torch.bool)
