"""`specc inspect --prompts`: what drafts of other tokens can propose of a text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer

from specc.artifact.directory import open_engine
from specc.artifact.vocabulary_coverage import lacking, token_ids
from specc.cli.prompts import needs_ids, plain_prompts
from specc.errors import ConfigError, RequestError


def show_coverage(directory: Path, prompts: Path, as_json: bool) -> None:
    """Print the share of the tokens of these prompts that each such draft can propose.

    Args:
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
    tokens = torch.tensor(token_ids(directory, manifest, texts), dtype=torch.int64)
    if not len(tokens):
        raise RequestError(f"{prompts}: no token", "texts of one token or more", "write a prompt")
    num_ids = manifest.models[0].vocab_size
    if len(wrong := tokens[(tokens < 0) | (tokens >= num_ids)]):
        raise RequestError(
            f"{prompts}: token id {int(wrong[0])}",
            f"ids from 0 to {num_ids - 1}",
            "correct the file",
        )
    found = {model.name: ~lacking(directory, manifest, model)[tokens] for model in drafts}
    if as_json:
        shares = {name: is_known.float().mean().item() for name, is_known in found.items()}
        print(json.dumps({"tokens": len(tokens), "proposed": shares}, indent=1))
        return
    for name, is_known in found.items():
        count = int(is_known.sum())
        share = count / len(tokens)
        typer.echo(f"{name} can propose {count} of the {len(tokens)} tokens ({share:.1%})")
