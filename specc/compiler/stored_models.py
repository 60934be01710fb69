"""Models of an engine, read back from its files: graphs before they were cut, and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import LayerEntry, ModelEntry, SelfDraftEntry
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import tensor_bytes
from specc.artifact.weight_spec import Source, WeightSpec
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.self_drafts import SelfDraftProgram
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError, EngineError
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.read_program import read_program
from specc.passes.lower.cpu.experts import unpack_experts
from specc.passes.program import AttentionLayer, Program, Weight, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.quantize.quantized_inputs import COLUMN_ORDER
from specc.passes.residual import layer_regions
from specc.passes.rewrite.skip_layers import SkipLayers
from specc.progress import PhaseTimer
from specc.sharding.rank_reader import RankReader, StagesReader
from specc.sharding.shard_plan import ShardPlan
from specc.system.json_file import read_engine_json

_AGAIN = "compile or copy the engine again"
# shape of a quantized weight, and how a file holds it
Held = tuple[tuple[int, ...], QuantizedLayout]


class _StoredSource(ModelSource):
    """A model whose graph is read from an engine: there is no module, and weights have its keys."""

    def weight_specs(
        self,
        program: Program,
        copies: Iterable[Weight] = (),
        tables: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> list[WeightSpec]:
        """What to write for each weight and constant of a program, whole where it is cut.

        Raises:
            EngineError: a file has a weight in another shape, as one of an older specc may.
        """
        cuts = program.shard.by_key if program.shard else {}
        specs = [
            WeightSpec(
                weight.key,
                weight.dtype if weight.quantized is None else torch.float32,
                cuts[weight.key].shape if weight.key in cuts else weight.shape,
                (Source(weight.key),),
                in_blocks=weight.in_blocks,
                quantized=weight.quantized,
            )
            for weight in (*program.weights.values(), *copies)
        ]
        # square matrices that were transposed pass, but of an expert's two, [H, 2 I] and [I, H],
        # one at least is not square
        for spec in specs:
            if (found := tuple(self.reader.shape(spec.key))) != spec.shape:
                raise EngineError(
                    f"{self.reader.location(spec.key)} with {spec.key} {list(found)}, which is"
                    f" {list(spec.shape)} here",
                    "an engine of this version of specc",
                    "compile the checkpoint again",
                )
        constants = {constant_key(name): value for name, value in program.constants.items()}
        values = {**constants, **tables}.items()
        return [*specs, *(WeightSpec.from_tensor(key, value) for key, value in values)]


@contextmanager
def open_models(
    engine: Path, manifest: Manifest, phases: PhaseTimer
) -> Iterator[list[CompiledModel]]:
    """The models of an engine with their graphs, the target whole; files are closed in the end."""
    models: list[CompiledModel] = []
    try:
        for entry in manifest.models:
            with phases.phase(f"read {entry.name}"):
                models.append(read_model(engine, manifest, entry))
        yield models
    finally:
        for model in models:
            model.source.reader.close()  # type: ignore[attr-defined]


def read_model(engine: Path, manifest: Manifest, entry: ModelEntry) -> CompiledModel:
    """A model of an engine, whole, by its graph and the files that it was written to.

    The caller closes the reader of its source.

    Raises:
        EngineError: a file that cannot be read.
    """
    program_json = read_stored(engine / entry.program_file)
    # what its target lends it is in no file of a draft
    own = {"inputs": [item for item in program_json["inputs"] if not item.get("is_lent")]}
    blocks = {
        item["key"]: tuple(item["blocks_of"]) for item in own["inputs"] if "blocks_of" in item
    }
    plan, whole_json, held = None, program_json, quantized_inputs(own)
    if entry is manifest.models[0]:
        # what drafts read of the target's files, copies that are rounded for them among it
        for draft in manifest.self_drafts:
            held |= quantized_inputs(read_stored(engine / draft.program_file))
    if manifest.is_cut(entry) and manifest.tensor_parallel_size > 1:
        plan = ShardPlan.read(engine / entry.shard_file)
        whole_json = read_stored(engine / entry.whole_file)
    elif entry.whole_file in manifest.files:
        # before it was quantized
        whole_json = read_stored(engine / entry.whole_file)
    reader = _open_weights(engine, manifest, entry, plan, blocks, held)
    constants = _constants(whole_json, reader)
    order = whole_json.get("keys", program_json.get("keys", ()))
    lent = (item["key"] for item in program_json["inputs"] if item.get("is_lent"))
    keys = [*order, *(plan.by_key if plan else ()), *reader.keys(), *lent, *constants]
    # a whole draft, which is taken over: kernels for a GPU have the place of its attention
    is_lowered = whole_json is program_json and facts_of(manifest.backend).is_on_gpu
    layers = [] if is_lowered else [(layer.name, layer.window) for layer in entry.layers]
    names = [layer.name for layer in entry.state_layers]
    program = read_program(whole_json, constants, layers, list(dict.fromkeys(keys)), names)
    if is_lowered:
        program.layers += map(_layer_of, entry.layers)
    program.integers = integers_of(program_json, reader)
    shared = [item for item in program_json["inputs"] if "of_target" in item]
    program.of_target = {item["name"]: item["of_target"] for item in shared}
    program.is_lent = any(item.get("is_lent") for item in shared)
    dtype = getattr(torch, entry.dtype)
    source = _StoredSource(entry.name, entry.source, dtype, nn.Module(), None, None, reader)
    return CompiledModel(source, program, entry)


def _layer_of(entry: LayerEntry) -> AttentionLayer:
    """As far as caches are planned for it."""
    sizes = (entry.num_heads, entry.num_kv_heads, entry.head_dim, entry.window, entry.sink)
    return AttentionLayer(
        entry.name,
        *sizes,
        entry.value_dim,
        chunk=entry.chunk,
        values_in_keys=entry.values_in_keys,
    )


def quantized_inputs(program: Mapping[str, Any]) -> dict[str, Held]:
    """Key → shape and layout of each quantized weight of a stored program; of a rank's part."""
    return {
        item["key"]: (
            tuple(item["quantized_of"]),
            QuantizedLayout.named(item["layout"].removeprefix("blocks-")),
        )
        for item in program["inputs"]
        if "quantized_of" in item
    }


def integers_of(
    program: Mapping[str, Any], reader: RankReader | StagesReader
) -> dict[str, KeptIntegers]:
    """Parameter → how a stored program holds it, as passes ask for what a checkpoint has.

    Args:
        program: JSON of it.
        reader: of the engine's files, which have the orders of columns.
    Raises:
        EngineError: it has orders of columns, and does not say of which weights.
    """
    inputs = {item["key"]: item for item in program["inputs"] if "key" in item}
    ordered = [item["name"] for item in program["inputs"] if item["name"].startswith(COLUMN_ORDER)]
    if ordered and not any("columns" in item for item in inputs.values()):
        raise EngineError(
            f"a graph with {ordered[0]}, whose weights do not say that their columns are in order",
            "an engine of this version of specc",
            "compile the checkpoint again, with the sizes that reshard was asked for",
        )
    found: dict[str, KeptIntegers] = {}
    for key, (_, layout) in quantized_inputs(program).items():
        order = inputs[key].get("columns")
        columns = b"" if order is None else bytes(tensor_bytes(reader.tensor(order)))
        kept = KeptIntegers(layout, columns, inputs[key].get("is_turned", False))
        found |= dict.fromkeys(key.removesuffix(f":{layout.name}").split("+"), kept)
    return found


def _open_weights(
    engine: Path,
    manifest: Manifest,
    entry: ModelEntry,
    plan: ShardPlan | None,
    blocks: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Held],
) -> RankReader | StagesReader:
    """What reads the weights of a model whole, from the files of all ranks and stages.

    Raises:
        EngineError: a file holds something else.
    """
    cuts, size = plan.by_key if plan else {}, plan.num_ranks if plan else 1
    # of what is cut, plans say it
    uncut = {key: item for key, item in held.items() if key not in cuts}

    def files_of(first: int) -> list[Path]:
        return [engine / manifest.weights_file(entry, first + place) for place in range(size)]

    if not manifest.stages or entry is not manifest.models[0]:
        return RankReader(files_of(0), cuts, blocks, uncut)
    stages: list[RankReader] = []
    try:
        for first in range(0, manifest.num_ranks, size):
            part = read_stored(engine / manifest.of_rank(first).models[0].program_file)
            keys = {item["key"] for item in part["inputs"] if "key" in item}
            own = {key: cut for key, cut in cuts.items() if key in keys}
            mine = {key: item for key, item in uncut.items() if key in keys}
            stages.append(RankReader(files_of(first), own, blocks, mine))
    except BaseException:
        for stage in stages:
            stage.close()
        raise
    return StagesReader(stages)


def read_self_draft(
    engine: Path, manifest: Manifest, entry: SelfDraftEntry, target: CompiledModel
) -> SelfDraftProgram:
    """A second program of the target, whole; it reads the target's weights, or rounded copies."""
    stored = read_stored(engine / entry.program_file)
    is_kept = entry.whole_file in manifest.files
    data = read_stored(engine / entry.whole_file) if is_kept else stored
    reader: Any = target.source.reader
    keys = data.get("keys") or [
        item["key"] for item in data["inputs"] if item["kind"] in ("weight", "constant")
    ]
    layers = [manifest.models[0].layers[number] for number in entry.layers]
    program = read_program(
        data,
        _constants(data, reader),
        [(layer.name, layer.window) for layer in layers],
        list(dict.fromkeys(keys)),
    )
    program.integers = integers_of(stored, reader)
    draft = drafter_of(entry.name)
    is_rounded = draft is not None and draft.weights is not None
    return SelfDraftProgram(in_rows(program), entry, is_rounded=is_rounded)


def _constants(data: Mapping[str, Any], reader: Any) -> dict[str, Tensor]:
    """Constants of a stored graph by key: see `WholeGraph` for those that no file has."""
    return {
        item["key"]: torch.tensor(item["value"], dtype=getattr(torch, item["dtype"]))
        if "value" in item
        else reader.tensor(item["key"])
        for item in data["inputs"]
        if item["kind"] == "constant"
    }


def in_rows(program: Program) -> Program:
    """Forget what the backend did to weights; the program itself."""
    unpack_experts(program)
    for name, weight in program.weights.items():
        program.weights[name] = dataclasses.replace(weight, in_blocks=False)
    return program


def read_stored(path: Path) -> Any:
    """A file of an engine that holds a program or what was said of it.

    Raises:
        EngineError: there is none, or it is no JSON.
    """
    return read_engine_json(path, "a program", _AGAIN)


class SkippedLayers:
    """Leaves layers out of the target's graph.

    Args:
        engine: its directory.
        manifest: of it, checked.
    Raises:
        ConfigError: a target that is cut for ranks, or a backend whose graphs have other layers.
        UnsupportedGraphError: layers that a value leads past.
        EngineError: a file that cannot be read.
    """

    def __init__(self, engine: Path, manifest: Manifest) -> None:
        entry = manifest.models[0]
        if manifest.is_cut(entry):
            raise ConfigError(
                f"an engine whose target is cut for {manifest.num_ranks} ranks",
                "one rank: a second program of the target is not cut",
                "search in an engine of one rank",
            )
        if entry.state_layers:
            raise ConfigError(
                "an engine whose target's layers keep states",
                "a target whose layers all attend: states are not read before a search's passes",
                "compile with --draft self:skip=… of layers that you choose",
            )
        facts = facts_of(manifest.backend)
        if facts.is_padded or facts.is_on_gpu:
            others = [
                name
                for name in backend_names()
                if facts_of(name).by_default and facts_of(name).takes_views
            ]
            raise ConfigError(
                f"an engine of the backend {facts.name}, whose graph joins layers or has no blocks",
                f"one of the backends {' or '.join(others)}",
                f"compile the same models with --backend {others[0]}, and search there: what is"
                " accepted is the same",
            )
        model = read_model(engine, manifest, entry)
        model.source.reader.close()  # type: ignore[attr-defined]
        self._program = model.program
        layer_regions(self._program)
        self.num_layers = len(self._program.layers)
        self._bytes = self._weight_bytes(tuple(range(self.num_layers)))

    def program(self, skipped: tuple[int, ...]) -> dict[str, Any]:
        """JSON of the program without these layers; it reads the target's weights and caches."""
        return program_to_json(self._without(skipped))

    def weight_share(self, skipped: tuple[int, ...]) -> float:
        """Bytes of weights that a pass without these layers reads, over those of a whole one.

        An embedding that is looked up counts on neither side, unless it is the head, too.
        """
        kept = tuple(n for n in range(self.num_layers) if n not in skipped)
        return self._weight_bytes(kept) / self._bytes

    def _without(self, skipped: tuple[int, ...]) -> Any:
        program = self._program.copy("target")
        kept = [n for n in range(self.num_layers) if n not in skipped]
        SkipLayers(kept).run(program)
        return program

    def _weight_bytes(self, kept: tuple[int, ...]) -> int:
        skipped = tuple(n for n in range(self.num_layers) if n not in kept)
        program, total = self._without(skipped), 0
        for name, weight in program.weights.items():
            users = program.placeholder(name).users
            if not all(_is_lookup(user.target) for user in users):
                size = weight.dtype.itemsize
                for length in weight.shape:
                    size *= length
                total += size
        return total


def _is_lookup(target: Any) -> bool:
    return "embedding" in str(target)
