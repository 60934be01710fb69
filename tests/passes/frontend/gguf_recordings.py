"""GGUF files of tiny models as llama.cpp's converter writes them, from what was recorded of it.

`tests/measure/record_gguf.py` converts models whose parameters are numbered, and keeps in
`gguf_recordings.json` the fields of the file and, of every tensor, which numbers of which parameter
it is. Here such a file is written of a model with other numbers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import gguf_files

FILE = Path(__file__).with_name("gguf_recordings.json")


@cache
def recordings() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write_recorded(path: Path, name: str, parameters: dict[str, Tensor]) -> None:
    """Write the file of a recorded model whose parameters are these, in float32."""
    recorded = recordings()[name]
    tensors = {}
    for stored, what in recorded["tensors"].items():
        value = tensor_of(what, parameters)
        tensors[stored] = ("F32", tuple(value.shape), value.numpy().tobytes())
    fields = {
        key: tensor_of(value, parameters).tolist() if isinstance(value, dict) else value
        for key, value in recorded["fields"].items()
    }
    gguf_files.write_file(path, fields | gguf_files.byte_fields(), tensors)


def tensor_of(what: dict[str, Any], parameters: dict[str, Tensor]) -> Tensor:
    """A tensor of a file, as it was recorded."""
    if "values" in what:
        return torch.tensor(what["values"], dtype=torch.float32).view(what["shape"])
    parts = []
    for name, *piece in what["of"]:
        if not piece:  # all of it
            parts.append(parameters[name].flatten())
            continue
        start, loops = piece
        index = torch.tensor(start)
        for count, stride in loops:
            index = index[..., None] + torch.arange(count) * stride
        parts.append(parameters[name].flatten()[index.flatten()])
    if what.get("is_minus_exp"):
        parts = [-part.exp() for part in parts]
    return (torch.cat(parts) + what.get("plus", 0.0)).view(what["shape"]).contiguous()
