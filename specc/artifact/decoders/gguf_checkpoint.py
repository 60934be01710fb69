"""GGUF files as checkpoints: which file a directory holds, and the weights that are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_architectures import ARCHITECTURES, PAIRED, model_name
from specc.artifact.decoders.gguf_file import BLOCKS, PLAIN, GGUFReader
from specc.artifact.decoders.gguf_parts import first_part
from specc.artifact.decoders.gguf_weight import METHOD, GGUFWeight
from specc.errors import WeightError


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors, or its first part; None if there is none.

    Raises:
        WeightError: there are several models.
    """
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1 and (first := first_part(found)) is not None:
        return first
    if len(found) > 1:
        raise WeightError(
            f"{directory} holds {found[0].name}, {found[-1].name} and no safetensors",
            "one GGUF file, or the parts of one",
            "leave one model there, or pass the file",
        )
    return found[0]


def open_gguf(path: Path, config: Any) -> tuple[GGUFReader, dict[str, DecodedWeight]]:
    """A GGUF file whose tensors have the names of a model of transformers, and its matrices.

    Args:
        path: of the file.
        config: configuration of the model, of transformers.
    Raises:
        WeightError: it is malformed, of another model, or of types that are not read.
    """
    reader = GGUFReader(path, model_name)
    try:
        return reader, _decode(reader, config)
    except BaseException:
        reader.close()
        raise


def _decode(reader: GGUFReader, config: Any) -> dict[str, DecodedWeight]:
    kind, where = reader.fields.get("general.architecture"), reader.location()
    model = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise WeightError(
            f"{where} is of the architecture {kind}",
            ", ".join(ARCHITECTURES) + ": others change norms or rows in ways of their own",
            "pass the checkpoint in safetensors",
        )
    if model not in ARCHITECTURES[kind]:
        raise WeightError(
            f"{where} is of the architecture {kind}, and config.json of the model type {model}",
            f"{' or '.join(ARCHITECTURES[kind])}",
            "pass the config.json and tokenizer.json of the same model",
        )
    heads = {
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
    }
    for name, count in heads.items():
        own = reader.fields.get(f"{kind}.attention.{name}", count)
        if own != count:
            raise WeightError(
                f"{where} has {name} {own}, and config.json {count}",
                "the same number",
                "pass the config.json of the same model",
            )
    found: dict[str, DecodedWeight] = {}
    for name, tensor in reader.tensors.items():
        module, _, part = name.rpartition(".")
        query, key = module.endswith(".q_proj"), module.endswith(".k_proj")
        is_paired = kind in PAIRED and (query or key)
        if is_paired and part == "bias":
            raise WeightError(
                f"{name} in {where}: queries and keys of {kind} with a bias",
                "a model without one: its rows would be in pairs, too",
                "pass the checkpoint in safetensors",
            )
        if tensor.kind in PLAIN and not is_paired:
            continue
        if len(tensor.shape) != 2:
            raise WeightError(
                f"{name} in {where} has shape {list(tensor.shape)}",
                "matrices: experts are not read from GGUF",
                "pass the checkpoint in safetensors",
            )
        count = heads["head_count" if query else "head_count_kv"]
        rows = tensor.shape[0] // count if is_paired else 0
        label = BLOCKS[tensor.kind][0] if tensor.kind in BLOCKS else str(PLAIN[tensor.kind])
        scheme = f"{METHOD}, {label.removeprefix('torch.')}"
        found[name] = GGUFWeight(name, tensor.shape, (name,), scheme, label, rows)
    return found
