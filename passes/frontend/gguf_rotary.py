"""Rotary embeddings of transformers that a GGUF file says, by fields and tensors of factors.

Factors of frequencies are a tensor: of Llama 3.1's scaling, of longrope's two lengths, and of heads
that are rotated in part (Gemma 4).
Source: llama.cpp, conversion/base.py, conversion/llama.py, conversion/phi.py, conversion/gemma.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.decoders.gguf_targets import Architecture
from specc.artifact.decoders.stored_tensors import read_tensor
from specc.errors import WeightError
from specc.passes.frontend.gguf_fields import Fields
from specc.passes.frontend.gguf_tensors import FREQUENCIES, LONG, NEVER, SHORT, are_factors_of

_SCALING = "rope.scaling."
# of Llama 3.1 and later: wavelengths above original / low are stretched, those below original /
# high are not
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# as llama.cpp's loader has them where a file has none
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def rotary_of(
    reader: GGUFReader, fields: Fields, architecture: Architecture, head_dim: int
) -> dict[str, Any]:
    """`rope_parameters` of transformers, of all layers or of each kind of them.

    Args:
        fields: of the file's architecture.
        head_dim: of layers that see all.
    Raises:
        WeightError: a scaling that is not read.
    """
    base = fields.number("rope.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    found |= _partial(fields, architecture, head_dim)
    found |= _scaled(reader, fields)
    found |= _of_factors(reader, fields, found, head_dim)
    if not architecture.has_own_rotary_by_layer or "attention.sliding_window" not in fields:
        return found
    local = fields.number("rope.freq_base_swa", architecture.window_base or base)
    windowed = {"rope_type": "default", "rope_theta": local}
    return {"full_attention": found, "sliding_attention": windowed}


def _partial(fields: Fields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    rotated = fields.number("rope.dimension_count", head_dim)
    if architecture.is_partial:
        return {"partial_rotary_factor": rotated / head_dim}
    if rotated != head_dim:
        raise fields.refusal(
            "rope.dimension_count",
            f"{head_dim}, the columns of a head: {architecture.models[0]} rotates all of them",
        )
    return {}


def _scaled(reader: GGUFReader, fields: Fields) -> dict[str, Any]:
    kind = fields.get(f"{_SCALING}type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.number(f"{_SCALING}factor")}
    if kind == "yarn":
        found = {
            "rope_type": "yarn",
            "factor": fields.number(f"{_SCALING}factor"),
            "original_max_position_embeddings": fields.number(f"{_SCALING}original_context_length"),
        }
        for name, usual in _BETAS.items():
            found[name] = fields.number(f"{_SCALING}yarn_{name}", usual)
        for key in ("attn_factor", "yarn_attn_factor"):
            if fields.number(f"{_SCALING}{key}", 1.0) != 1.0:
                found["attention_factor"] = fields.number(f"{_SCALING}{key}")
        if fields.number(f"{_SCALING}yarn_ext_factor", 1.0) != 1.0:
            raise fields.refusal(f"{_SCALING}yarn_ext_factor", "1, or none")
        return found
    if kind not in ("none", "longrope"):
        raise fields.refusal(f"{_SCALING}type", "none, linear, yarn or longrope")
    if kind == "longrope" and LONG not in reader.tensors:
        raise fields.refusal(f"{_SCALING}type", f"the tensors {LONG} and {SHORT}")
    return {}


def _of_factors(
    reader: GGUFReader, fields: Fields, found: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """What tensors of factors say."""
    if LONG in reader.tensors or SHORT in reader.tensors:
        return _longrope(reader, fields)
    if FREQUENCIES not in reader.tensors:
        return {}
    factors = read_tensor(reader, FREQUENCIES).float()
    if found["rope_type"] == "default" and bool(((factors == 1) | (factors >= NEVER / 2)).all()):
        count = int((factors == 1).sum())
        if bool((factors[:count] == 1).all()) and count < len(factors):
            return {"rope_type": "proportional", "partial_rotary_factor": count / len(factors)}
    stretched = llama3_of(factors, float(found["rope_theta"]), head_dim)
    if found["rope_type"] != "default" or stretched is None:
        raise WeightError(
            f"{reader.location()} has factors of rotary frequencies ({FREQUENCIES}) that are not"
            " those of Llama 3.1's scaling",
            "no such factors, or these",
            "put the file in a directory with config.json and tokenizer.json of the model, and"
            " pass that",
        )
    return stretched


def _longrope(reader: GGUFReader, fields: Fields) -> dict[str, Any]:
    lost = [name for name in (LONG, SHORT) if name not in reader.tensors]
    if lost:
        raise WeightError(
            f"{reader.location()} holds no {lost[0]}",
            f"{LONG} and {SHORT}",
            "download or convert the file again",
        )
    long, short = (read_tensor(reader, name).float().tolist() for name in (LONG, SHORT))
    found = {
        "rope_type": "longrope",
        "long_factor": [fields.decimal(x) for x in long],
        "short_factor": [fields.decimal(x) for x in short],
        "original_max_position_embeddings": fields.number(f"{_SCALING}original_context_length"),
    }
    if f"{_SCALING}attn_factor" in fields:
        found["attention_factor"] = fields.number(f"{_SCALING}attn_factor")
    return found


def llama3_of(factors: Tensor, base: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling whose factors these are; None where it is none of Llama 3.1's kind.

    Args:
        factors: [head_dim / 2] float32.
        base: of the frequencies.
        head_dim: columns of a head.
    """
    if not factors.numel() or len(factors) != head_dim // 2:
        return None
    most = float(factors.max())
    usual = {"rope_theta": base, **_LLAMA3, "factor": round(most, 4)}
    for tried in (usual, _fitted(factors, base, head_dim, usual)):
        if tried is not None and most >= 1 and are_factors_of(factors, _llama(head_dim, tried)):
            return tried
    return None


def _fitted(
    factors: Tensor, base: float, head_dim: int, usual: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Positions and limits of a scaling, by the factors between its limits.

    There 1 / factor = (1 - s) / most + s, and s is a line over frequencies.
    """
    most = float(factors.max())
    inner = (factors > 1.0001) & (factors < most * 0.9999)
    if int(inner.sum()) < 2 or most <= 1:
        return None
    frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    x = frequencies[inner] / (2 * torch.pi)
    share = (1 / factors[inner].double() - 1 / most) / (1 - 1 / most)
    slope = float((share[0] - share[-1]) / (x[0] - x[-1]))
    offset = float(slope * x[0] - share[0])
    if slope <= 0 or offset <= 0:
        return None
    # with a low limit of 1, the others are these
    high = round(1 + 1 / offset, 3)
    original = round(slope / offset)
    return {**usual, "high_freq_factor": high, "original_max_position_embeddings": original}


def _llama(head_dim: int, rope: dict[str, Any]) -> Any:
    """A configuration of transformers that has a rotary scaling and heads of this width."""
    from transformers import LlamaConfig

    return LlamaConfig(head_dim=head_dim, rope_parameters=rope)
