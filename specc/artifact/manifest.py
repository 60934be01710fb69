"""The manifest of an engine directory: typed, validated, and the same facts in JSON."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from specc.artifact.manifest_decode import decode, invalid
from specc.artifact.rectangle import CacheRows
from specc.errors import EngineError, SpeccError
from specc.speculation.plans import SpecPlan

SCHEMA_VERSION = 5
MANIFEST_FILE = "manifest.json"
# written by `specc tune`
PROFILE_FILE = "profile.json"
# backends whose programs take rectangles of tokens
RECTANGULAR = ("onnx", "tensorrt")
# backends that run on a GPU
ON_GPU = ("cuda", "tensorrt")
# what chooses the plan of a step
POLICIES = ("fixed", "best", "profile")


@dataclass(frozen=True)
class LayerEntry:
    """One attention layer; its cache is row `index` of slab `slab`. window 0 is no limit."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    slab: int
    index: int


@dataclass(frozen=True)
class SlabEntry:
    """Caches of equal geometry: [num_layers, 2, blocks, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelEntry:
    """The target or a draft: `dir` holds program.json and weights.safetensors.

    Args:
        source: what the user called it: a path, a hub id, or the class of a module.
        location: absolute path of the checkpoint, where `source` is a path; else None.
        unread_tensors: of the checkpoint, which no graph reads.
        nonfinite_weights: weights that are NaN or infinite, which the user has allowed.
    """

    name: str
    dir: str
    architecture: str
    model_type: str
    vocab_size: int
    num_parameters: int
    max_position: int
    layers: tuple[LayerEntry, ...]
    slabs: tuple[SlabEntry, ...]
    source: str
    dtype: str
    location: str | None = None
    unread_tensors: tuple[str, ...] = ()
    nonfinite_weights: int = 0

    @property
    def checkpoint(self) -> str:
        """Where to load the original from, whatever the working directory is."""
        return self.location or self.source

    @property
    def program_file(self) -> str:
        return f"{self.dir}/program.json"

    @property
    def package_file(self) -> str:
        """The compiled program, in engines of a compiled backend."""
        return f"{self.dir}/program.pt2"

    @property
    def onnx_file(self) -> str:
        """The rectangular program, in engines of a backend that runs rectangles."""
        return f"{self.dir}/model.onnx"

    @property
    def plan_file(self) -> str:
        """The TensorRT engine, which TensorRT calls a plan."""
        return f"{self.dir}/model.plan"

    @property
    def build_file(self) -> str:
        """What the TensorRT builder said of it."""
        return f"{self.dir}/build.json"

    @property
    def weights_file(self) -> str:
        return f"{self.dir}/weights.safetensors"


@dataclass(frozen=True)
class DynamicEntry:
    """See `specc.speculation.plans.DynamicTree`."""

    num_nodes: int
    top_k: int
    depth: int


@dataclass(frozen=True)
class PlanEntry:
    """A plan, see `specc.speculation.plans.SpecPlan`, and the file of its step program."""

    name: str
    widths: tuple[int, ...]
    parents: tuple[int, ...]
    dynamic: DynamicEntry | None
    drafts: tuple[str, ...]
    combine: str
    tile: int | None
    file: str

    @classmethod
    def of(cls, plan: SpecPlan, file: str) -> PlanEntry:
        dynamic = DynamicEntry(**dataclasses.asdict(plan.dynamic)) if plan.dynamic else None
        shape = (plan.name, plan.widths, plan.parents, dynamic)
        return cls(*shape, plan.drafts, plan.combine, plan.tile, file)

    @property
    def plan(self) -> SpecPlan:
        """Raises SpeccError: no such plan can be."""
        return SpecPlan.from_json(dataclasses.asdict(self))


@dataclass(frozen=True)
class LimitsEntry:
    """Sizes that the engine was compiled for; block_size 0 is dense, one block a sequence.

    Plans whose logits would take more than max_logits_mb are in tiles.
    """

    max_batch_size: int
    max_seq_len: int
    block_size: int
    prefill_chunk: int
    max_nodes: int
    max_logits_mb: int


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer; file None where the engine takes token ids only."""

    file: str | None
    map_sha256: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes that one model takes at run time."""

    weights: int
    cache: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.workspace


@dataclass(frozen=True)
class NativeEntry:
    """Compiled code for CPUs: the operators' library, and the instruction sets that it may use."""

    library: str
    isa_flags: tuple[str, ...]


@dataclass(frozen=True)
class RectangleEntry:
    """ONNX files of the models: their opset, and the rows of a cache, see `CacheRows`."""

    opset: int
    front: int
    slots: int
    scratch: int

    @property
    def rows(self) -> CacheRows:
        return CacheRows(self.front, self.slots, self.scratch)


@dataclass(frozen=True)
class TensorRTEntry:
    """What built the TensorRT engines, and for which GPU; None is every GPU that it supports."""

    name: str
    version: str
    compute_capability: str | None


@dataclass(frozen=True)
class FileEntry:
    """Content of one file of the engine."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json. `memory_plan` in JSON also has a key `total`, which is derived.

    Args:
        torch_version: without the local part (`+cpu`).
        created: ISO 8601.
        models: the target first.
        memory_plan: model name → bytes.
        policy: what chooses the plan of a step, see `CompileConfig`.
        native: what compiled code needs of the machine; None where there is none.
        rectangle: of engines whose programs take rectangles of tokens; else None.
        tensorrt: of engines for TensorRT; else None.
        probe: what the compiler measured at the end, or None.
        files: every file but the manifest, path with `/` relative to the engine → content.
    """

    specc_version: str
    torch_version: str
    created: str
    backend: str
    device: str
    models: tuple[ModelEntry, ...]
    plans: tuple[PlanEntry, ...]
    default_plan: str
    limits: LimitsEntry
    tokenizer: TokenizerEntry
    memory_plan: dict[str, MemoryEntry]
    policy: str = "fixed"
    native: NativeEntry | None = None
    rectangle: RectangleEntry | None = None
    tensorrt: TensorRTEntry | None = None
    probe: dict[str, Any] | None = None
    files: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def dtype(self) -> str:
        """Of the target; drafts may have others."""
        return self.models[0].dtype

    @property
    def total_memory(self) -> int:
        return sum(entry.total for entry in self.memory_plan.values())

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data, `schema_version` first."""
        data = {"schema_version": self.schema_version} | _plain(dataclasses.asdict(self))
        data["memory_plan"]["total"] = self.total_memory
        return data

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Decode and validate.

        Raises:
            EngineError: the schema is newer, or a field is absent, unknown, of another type, or
                names something that does not exist.
        """
        if not isinstance(data, dict) or type(data.get("schema_version")) is not int:
            raise invalid("it has no schema_version", f"schema_version {SCHEMA_VERSION}")
        version = data["schema_version"]
        if version > SCHEMA_VERSION:
            raise EngineError(
                f"an engine of schema version {version}, written by a newer specc "
                f"({data.get('specc_version')})",
                f"schema version {SCHEMA_VERSION}",
                "update specc, or compile the engine again with this version",
            )
        if version < SCHEMA_VERSION:
            raise EngineError(
                f"an engine of schema version {version}, written by an older specc "
                f"({data.get('specc_version')})",
                f"schema version {SCHEMA_VERSION}",
                "compile the engine again with this version",
            )
        memory = data.get("memory_plan")
        if not isinstance(memory, dict) or "total" not in memory:
            raise invalid("memory_plan has no total", "an object with a total")
        models_memory = {name: entry for name, entry in memory.items() if name != "total"}
        manifest = decode(cls, data | {"memory_plan": models_memory}, "")
        if memory["total"] != manifest.total_memory:
            raise invalid(
                f"memory_plan.total is {memory['total']!r}", f"the sum {manifest.total_memory}"
            )
        manifest.validate()
        return manifest

    def validate(self) -> None:
        """Check what types cannot say.

        Raises:
            EngineError: a path leaves the directory, or a reference has no referent.
        """
        for model in self.models:
            check_relative(model.dir)
            for layer in model.layers:
                if not 0 <= layer.slab < len(model.slabs):
                    raise invalid(
                        f"{model.name}.{layer.name} has slab {layer.slab}",
                        f"one of {len(model.slabs)} slabs",
                    )
                slab = model.slabs[layer.slab]
                geometry = (layer.num_kv_heads, layer.head_dim)
                if (slab.num_kv_heads, slab.head_dim) != geometry or not (
                    0 <= layer.index < slab.num_layers
                ):
                    raise invalid(
                        f"{model.name}.{layer.name} does not fit slab {layer.slab}",
                        f"{slab.num_layers} layers of {slab.num_kv_heads} heads, "
                        f"head_dim {slab.head_dim}",
                    )
        if self.native is not None:
            check_relative(self.native.library)
        if not self.models:
            raise invalid("models is empty", "the target, then drafts")
        needs_native, may_have_native = self.backend == "cpu", self.backend in ("cpu", "onnx")
        if self.native is None if needs_native else self.native is not None and not may_have_native:
            raise invalid(
                f"backend {self.backend} with native {self.native}",
                "a native library for the backend cpu, and none for those of a GPU",
            )
        if (self.backend in RECTANGULAR) != (self.rectangle is not None):
            raise invalid(
                f"backend {self.backend} with rectangle {self.rectangle}",
                f"rows of rectangles for the backends {' and '.join(RECTANGULAR)}",
            )
        if (self.backend == "tensorrt") != (self.tensorrt is not None):
            raise invalid(
                f"backend {self.backend} with tensorrt {self.tensorrt}",
                "what built the engines for the backend tensorrt, and nothing for others",
            )
        if self.rectangle is not None:
            _check_non_negative(self.rectangle, "rectangle")
            needed = self.limits.max_seq_len + self.limits.max_nodes
            if self.rectangle.slots != needed or self.limits.block_size:
                raise invalid(
                    f"rectangle.slots is {self.rectangle.slots}, limits.block_size is"
                    f" {self.limits.block_size}",
                    f"{needed} slots, max_seq_len and max_nodes together, and dense caches",
                )
        names = [plan.name for plan in self.plans]
        if self.default_plan not in names:
            raise invalid(f"default_plan is {self.default_plan}", f"one of {', '.join(names)}")
        if len(set(names)) < len(names):
            raise invalid(f"plans are {', '.join(names)}", "plans of different names")
        for plan in self.plans:
            self._check_plan(plan)
        if self.policy not in POLICIES:
            raise invalid(f"policy is {self.policy}", f"one of {', '.join(POLICIES)}")
        unplanned = {model.name for model in self.models} ^ set(self.memory_plan)
        if unplanned:
            raise invalid(
                f"memory_plan and models disagree about {', '.join(sorted(unplanned))}",
                "one entry for each model",
            )
        _check_non_negative(self.limits, "limits")
        for name, memory in self.memory_plan.items():
            _check_non_negative(memory, f"memory_plan.{name}")
        for path, entry in self.files.items():
            check_relative(path)
            if path == MANIFEST_FILE or not re.fullmatch("[0-9a-f]{64}", entry.sha256):
                raise invalid(f"files.{path} is {entry}", "the sha256 and size of another file")
            _check_non_negative(entry, f"files.{path}")
        for path in self.required_files:
            if path not in self.files:
                raise invalid(f"{path} is used but not listed in files", "every file, with hash")

    def _check_plan(self, entry: PlanEntry) -> None:
        try:
            plan = entry.plan
        except SpeccError as error:
            raise invalid(f"plan {entry.name} is {error.found}", error.needed) from error
        models = [model.name for model in self.models]
        if missing := [model for model in plan.models if model not in models]:
            raise invalid(f"plan {entry.name} asks {missing[0]}", f"one of {', '.join(models)}")
        if plan.num_rows > self.limits.max_nodes:
            raise invalid(
                f"plan {entry.name} takes {plan.num_rows} rows, limits.max_nodes is"
                f" {self.limits.max_nodes}",
                "rows for every plan",
            )

    @property
    def required_files(self) -> tuple[str, ...]:
        """Files that the runtime opens; each is listed in `files`."""
        files = [f for model in self.models for f in (model.program_file, model.weights_file)]
        files += [plan.file for plan in self.plans]
        if self.native is not None:
            files.append(self.native.library)
        if self.backend == "cpu":
            files += [model.package_file for model in self.models]
        if self.backend in RECTANGULAR:
            files += [model.onnx_file for model in self.models]
        if self.backend == "tensorrt":
            files += [f for model in self.models for f in (model.plan_file, model.build_file)]
        return (*files, self.tokenizer.file) if self.tokenizer.file else tuple(files)


def check_relative(path: str) -> None:
    """Accept paths inside the engine directory only: `a/b.json`, no `..`, not absolute.

    Raises:
        EngineError: the path could name a file elsewhere.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise invalid(f"the path {path!r}", "a path inside the engine directory")


def _check_non_negative(entry: Any, where: str) -> None:
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if isinstance(value, int) and value < 0:
            raise invalid(f"{where}.{field.name} is {value}", "0 or more")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
