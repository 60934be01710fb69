"""Models whose checkpoints are quantized: what they do not go with, and what is told of them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from specc.artifact.model_entry import ModelEntry
from specc.compiler.compiled_model import CompiledModel
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.program import Program
from specc.passes.quantize.row_integers import has_rows_of


def describe_quantization(model: CompiledModel, asked: str | None) -> ModelEntry:
    """The entry of a model, with how its projections are stored.

    Args:
        model: after its last pass.
        asked: what `--quantize` says, or None; it says nothing of drafts that read hidden states.
    """
    counts: Counter[str] = Counter()
    for weight in model.program.weights.values():
        if weight.quantized is not None:
            counts[weight.quantized.name] += math.prod(weight.shape)
    names = [name for name, _ in counts.most_common()]
    scheme = model.source.scheme
    is_asked = scheme is None and model.source.head is None
    stored = asked if is_asked else " and ".join(names) or None
    return dataclasses.replace(model.entry, quantization=stored, checkpoint_scheme=scheme)


def told_of_quantized(models: Sequence[CompiledModel]) -> list[str]:
    """Weights that are quantized in the checkpoint, and that the engine holds in its own type."""
    told = []
    for model in models:
        names = model.source.decoded_names(model.program)
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            told.append(
                f"{model.name}: {len(names)} quantized weight{'s' * (len(names) != 1)} of the"
                f" checkpoint become {model.entry.dtype}, since no operator of the engine reads"
                f" them as they are: {shown}"
            )
    return told


def check_used_bits(config: CompileConfig, programs: Iterable[Program]) -> None:
    """Refuse a number of bits that no product has in the end.

    Args:
        config: of the engine.
        programs: of all models and self-drafts, after their last passes.
    Raises:
        ConfigError: rows have as few bits anyway, or the checkpoint's weights are not integers.
    """
    bits = config.activation_bits
    if bits is None or any(has_rows_of(program, bits) for program in programs):
        return
    raise ConfigError(
        f"--activation-bits {bits}, which changes no product of these models in {config.dtype}",
        "weights in int8, int4 or mxfp4, and rows of more bits: bfloat16 has 16, float32 24",
        "leave it out" + (", or pass --activation-bits 8" if bits > 8 else ""),
    )
