"""Weights that a draft reads from its target's file: an embedding and a head that are the target's.

A draft that reads hidden states may have no embedding and no head of its own
(`HeadSpec.shared`). Where its program reads them as the target's does, in the same type and
layout, they are in the target's file alone. Where the target's are integers, so are the draft's.
Of a target that is cut, for ranks, stages or segments, no file has them whole: then the draft's own
has them, after all that it has anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from specc.artifact.backends import BackendFacts
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import write_weights
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.context import CompileContext
from specc.config import CompileConfig
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.drafters.shared_weights import shared_weights
from specc.passes.lower.cpu.linear import LowerLinear
from specc.passes.program import Program, Weight
from specc.system.json_file import read_engine_json

aten = torch.ops.aten


def is_lending(config: CompileConfig, facts: BackendFacts) -> bool:
    """Whether drafts can read from the file of the target of an engine: it is whole, and read."""
    is_cut = config.tensor_parallel_size * config.pipeline_parallel_size > 1
    return not (is_cut or config.segments or facts.is_padded)


def lend_weights(context: CompileContext, models: Sequence[CompiledModel]) -> None:
    """Find what drafts share with the target, see `Program.of_target`.

    Args:
        models: after their last passes, the target first.
    """
    target, *drafts = models
    for draft in drafts:
        if (head := draft.source.head) is None:
            continue
        # what steps read is in a draft's own file
        beside, _ = drafter_of_files(head).step_weights(head, draft.source.dtype)
        for parameter, known in shared_weights(head, target.source.module, target.program):
            for node in draft.program.graph.find_nodes(op="placeholder"):
                weight = draft.program.weights.get(node.target)
                if weight is None or weight.key in beside or weight.parameters != (parameter,):
                    continue
                _share(draft.program, node, known)
        draft.program.is_lent = is_lending(context.config, context.facts)


def _share(program: Program, node: fx.Node, known: Weight) -> None:
    """One placeholder of a draft, if it reads the weight as the target has it.

    Args:
        known: of the target; of one that is cut, a rank's part.
    """
    weight = program.weights[node.target]
    if known.in_blocks and {user.target for user in node.users} == {aten.embedding.default}:
        # a head that is the embedding has put it there, and lookups find rows in blocks, too
        weight = replace(weight, in_blocks=True)
    held = weight.dtype, weight.quantized, weight.is_turned, weight.in_blocks
    if held != (known.dtype, known.quantized, known.is_turned, known.in_blocks):
        return
    if program.weights[node.target] != weight:
        program.weights[node.target] = weight
        LowerLinear().run(program)
    program.of_target[node.target] = known.key


def move_shared(
    engine: Path, manifest: Manifest, entry: ModelEntry, writer: EngineWriter, is_lent: bool
) -> int:
    """Write a draft of an engine anew, with what it shares in its own file, or without.

    Args:
        engine: directory of the one that there is.
        entry: of a draft that has it the other way there.
        is_lent: the new one's target lends it.
    Returns:
        bytes by which the draft's weights grow.
    Raises:
        EngineError, WeightError: a file cannot be read.
    """
    program = read_engine_json(engine / entry.program_file, "a program", "copy the engine again")
    shared: dict[str, str] = {}
    for item in program["inputs"]:
        if "of_target" in item:
            shared[item["key"]] = item["of_target"]
            item.pop("is_lent", None)
            item |= {"is_lent": True} if is_lent else {}
    writer.write_json(entry.program_file, program)
    target = manifest.models[0]
    own, other = (
        SafetensorsReader(engine / manifest.weights_file(model, 0), reads_float8=True)
        for model in (entry, target)
    )
    with own, other:
        if is_lent:
            places = {key: (own, key) for key in own.keys() if key not in shared}  # noqa: SIM118
            grown = -sum(own.place(key)[1] for key in shared)
        else:
            places = {key: (own, key) for key in own.keys()}  # noqa: SIM118
            places |= {key: (other, name) for key, name in shared.items()}
            grown = sum(other.place(name)[1] for name in shared.values())
        reader = _Files(places, str(engine))
        specs = [
            WeightSpec(key, reader.dtype(key), reader.shape(key), (Source(key),)) for key in places
        ]
        file = manifest.weights_file(entry, 0)
        # numbers are as they are
        written = write_weights(specs, reader, writer.path(file), nonfinite=lambda item: None)
    writer.record(file, written)
    return grown


class _Files(ForwardingReader):
    """Tensors of several files."""

    def __init__(self, places: dict[str, tuple[SafetensorsReader, str]], name: str) -> None:
        self._places, self._name = places, name

    def keys(self) -> Iterable[str]:
        return self._places.keys()

    def location(self, key: str | None = None) -> str:
        return self._name if key is None else self._places[key][0].location(key)

    def source_of(self, key: str) -> tuple[SafetensorsReader, str]:
        return self._places[key]
