"""`specc inspect --prompts`: what drafts of other tokens can propose of a text."""

from __future__ import annotations

import json
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
    tokens = torch.tensor(_tokens(directory, manifest, prompts))
    if int(tokens.max()) >= manifest.models[0].vocab_size:
        raise RequestError(
            f"{prompts}: token id {int(tokens.max())}",
            f"ids below {manifest.models[0].vocab_size}",
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


def _tokens(directory: Path, manifest: Manifest, prompts: Path) -> list[int]:
    """Of all prompts, one after the other."""
    texts, file = plain_prompts(prompts), manifest.tokenizer.file
    needs_ids(texts, file is not None)
    tokenizer = Tokenizer.from_file(str(directory / file)) if file else None
    ids: list[int] = []
    for text in texts:
        if not isinstance(text, str):
            ids += text
        elif tokenizer is not None:
            ids += tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise RequestError(f"{prompts}: no token", "texts of one token or more", "write a prompt")
    return ids


def _lacking(directory: Path, manifest: Manifest, model: ModelEntry) -> Tensor:
    """[V] bool: target ids that a draft never proposes."""
    program = read_json(directory / model.program_file, EngineError, "a program", _AGAIN)
    key = next(item["key"] for item in program["inputs"] if item["name"] == LACKING)
    with SafetensorsReader(directory / manifest.weights_file(model)) as reader:
        data = b"".join(bytes(chunk) for chunk in reader.read_chunks(key))
    return torch.frombuffer(bytearray(data), dtype=torch.bool)
