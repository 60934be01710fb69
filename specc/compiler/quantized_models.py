"""Models whose checkpoints are quantized: what they do not go with, and what is told of them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.artifact.model_entry import ModelEntry
from specc.compiler.backends.base import CompilerBackend
from specc.compiler.backends.registry import compiler_backend
from specc.compiler.candidate import Candidate
from specc.compiler.compiled_model import CompiledModel
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.lower.cpu.row_integers import has_rows_of
from specc.passes.program import Program
from specc.speculation.plans import SpecPlan

_FIELD = "quantize"


def check_quantized(
    models: Sequence[Candidate], config: CompileConfig, backend: CompilerBackend
) -> None:
    """Refuse quantized checkpoints where `--quantize` would be refused.

    Raises:
        ConfigError: a backend that reads no integers.
    """
    found = next((model for model in models if model.scheme is not None), None)
    if found is None:
        return
    what = f"a quantized checkpoint ({found.name.replace('_', ' ')}: {found.scheme})"
    if _FIELD not in backend.options:
        takers = [name for name in backend_names() if _FIELD in compiler_backend(name).options]
        raise ConfigError(
            f"{what} with backend {backend.name}",
            f"the backend {' or '.join(takers)}: no other reads quantized weights",
            f"pass --backend {takers[0]}, or the unquantized checkpoint",
        )


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


def check_activation_bits(
    config: CompileConfig, plans: Sequence[SpecPlan], keeps_integers: bool
) -> None:
    """Refuse a number of bits before anything is traced, where no weight is to be integers.

    Args:
        config: of the engine.
        plans: of the engine; the weights of self-drafts may be rounded.
        keeps_integers: a checkpoint is quantized.
    Raises:
        ConfigError: `--activation-bits` would change nothing, or the head alone.
    """
    if config.activation_bits is None:
        return
    kinds = {own.weights for plan in plans for own in plan.self_drafts} | {config.quantize}
    is_fp8 = config.quantize == "fp8"
    if not is_fp8 and (keeps_integers or kinds & {"int8", "int4"}):
        return
    raise ConfigError(
        f"--activation-bits {config.activation_bits} "
        + ("and --quantize fp8" if is_fp8 else "without weights in int8 or int4"),
        "weights in int8 or int4" + (": rows by fp8 stay floats, all but the head's" * is_fp8),
        "pass --quantize int8 or int4, or leave out --activation-bits",
    )


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


def check_cut_integers(
    config: CompileConfig, facts: BackendFacts, plans: Sequence[SpecPlan], keeps_integers: bool
) -> None:
    """Refuse ranks where a backend has no parts of integers.

    Args:
        config: of the engine.
        facts: of its backend.
        plans: of the engine; the weights of self-drafts may be rounded.
        keeps_integers: a checkpoint is quantized.
    Raises:
        ConfigError: some weights are quantized, and ranks would have parts of them.
    """
    rounded = [own.option for plan in plans for own in plan.self_drafts if own.weights]
    # drafts are cut for as many, or not at all
    ranks = config.tensor_parallel_size
    if facts.cuts_quantized or ranks == 1:
        return
    if not (keeps_integers or config.quantization or rounded):
        return
    takers = [name for name in backend_names() if facts_of(name).cuts_quantized]
    raise ConfigError(
        f"quantized weights for {ranks} ranks with backend {facts.name}",
        f"the backend {' or '.join(takers)}, whose ranks have parts of them",
        f"pass --backend {takers[0]}, one rank, or weights that are not quantized",
    )
