"""A loaded engine: programs bound to their weights and caches, and the facts that requests need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from specc.artifact.directory import open_engine
from specc.artifact.manifest import ON_GPU, PROFILE_FILE
from specc.artifact.rectangle import CacheRows
from specc.artifact.unreplaced import unreplaced
from specc.errors import ConfigError, EngineError

# importing this registers the operators that programs call
from specc.kernels import native
from specc.kernels import ops as _ops  # noqa: F401
from specc.runtime.backends.cuda.backend import (
    CaptureLimits,
    DeviceOperators,
    LayerCaches,
    cuda_device,
    load_programs,
)
from specc.runtime.backends.cuda.device_memory import fit_device
from specc.runtime.backends.mapped_weights import MappedWeights
from specc.runtime.backends.onnx.backend import load_onnx_programs
from specc.runtime.backends.onnx.program import can_grow
from specc.runtime.backends.program import Model, ModelProgram, Step, StepProgram, read_json
from specc.runtime.backends.tensorrt.backend import load_trt_programs
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.execution.device_link import DeviceLink, HostLink
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.shared_loop import FairLock
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import check_threads

if TYPE_CHECKING:
    from specc.artifact.manifest import Manifest, ModelEntry

BACKENDS = ("cpu", "cuda", "eager", "onnx", "tensorrt")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DO = "compile the engine again"


@dataclass
class Engine:
    """Everything `LLM` needs; `Engine.load` makes one from an engine directory.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        steps: plan name → step program; `off` is among them.
        cache: that all programs are bound to.
        default_plan: name of a plan.
        prefill_chunk: tokens of a causal pass at most.
        vocab_size: token ids of the target; the compiler fits drafts to it.
        position_limit: positions 0 … position_limit - 1 exist in every model.
        tokenizer: None where the engine has none; prompts are token ids then.
        eos_token_ids: end an output.
        bos_token_id: put before a text prompt where `add_bos`.
        manifest: None for an engine made by hand.
        backend: what runs the programs: `cuda` (captured graphs), `cpu` (compiled code), `onnx`
            (onnxruntime), `tensorrt` (its engines in captured graphs) or `eager` (torch, op by
            op).
        operators: namespace of the `specc::` operators that this backend runs.
        mapped_weights: files that the programs read, to be checked while they run.
        profile: what `specc tune` measured here; empty where it has not.
        directory: that it was loaded from; None for an engine made by hand.
        link: to the device that the programs run on.
        turn: held for each iteration of the `LLM`s over this engine, in whatever threads.
    """

    target: Model
    drafts: list[Model]
    steps: dict[str, Step]
    cache: KVCache
    default_plan: str
    prefill_chunk: int
    vocab_size: int
    position_limit: int
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    add_bos: bool = False
    manifest: Manifest | None = None
    backend: str = "eager"
    operators: Any = torch.ops.specc
    mapped_weights: tuple[MappedWeights, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    link: HostLink | DeviceLink = field(default_factory=HostLink)
    turn: FairLock = field(default_factory=FairLock, repr=False, compare=False)

    @property
    def plans(self) -> dict[str, SpecPlan]:
        return {name: step.plan for name, step in self.steps.items()}

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars of structured outputs."""
        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    @property
    def policy(self) -> str:
        """What chooses plans, unless a caller does: `fixed`, `best` or `profile`."""
        return self.manifest.policy if self.manifest else "fixed"

    @property
    def window(self) -> int:
        """The smallest window of the target's layers; 0 where none has one."""
        layers = self.manifest.models[0].layers if self.manifest else []
        return min((layer.window for layer in layers if layer.window), default=0)

    @property
    def max_seq_len(self) -> int:
        return self.cache.shape.max_seq_len

    def check_weights(self) -> None:
        """Raises EngineError: a mapped file was cut while in use."""
        for weights in self.mapped_weights:
            weights.check()

    @classmethod
    def load(
        cls,
        path: str | Path,
        verify: bool | None = None,
        num_threads: int | None = None,
        max_num_seqs: int | None = None,
        backend: str | None = None,
        capture: CaptureLimits | None = None,
        kv_cache_tokens: int | None = None,
    ) -> Engine:
        """Open an engine directory; weights stay in the memory-mapped files.

        Args:
            path: the engine directory.
            verify: compare every file with its hash in the manifest; None leaves out the weights,
                which would be read for it; False compares none.
            num_threads: threads of torch, for the whole process; None leaves them alone. Compiled
                programs keep the number that they were loaded with.
            max_num_seqs: sequences that run together, and the size of the caches; None is what
                the engine was compiled for.
            backend: `eager` runs the graphs of any engine; None is what it was compiled for.
            capture: what capturing CUDA graphs may cost here; None is the default.
            kv_cache_tokens: rows of the cache, for all sequences together: where they run out,
                requests give way to others. None is the worst case of `max_num_seqs` sequences.
        Raises:
            EngineError: the directory is no engine, is altered, or needs another runtime or more
                memory.
            ConfigError: more sequences or fewer threads than possible.
        """
        path = Path(path)
        with unreplaced(path):
            return cls._load(
                path, verify, num_threads, max_num_seqs, backend, capture, kv_cache_tokens
            )

    @classmethod
    def _load(
        cls,
        path: Path,
        verify: bool | None,
        num_threads: int | None,
        max_num_seqs: int | None,
        backend: str | None,
        capture: CaptureLimits | None,
        kv_cache_tokens: int | None,
    ) -> Engine:
        manifest = open_engine(
            path, verify, backend=backend, backends=BACKENDS, max_num_seqs=max_num_seqs
        )
        backend = backend or manifest.backend
        for model in manifest.models:
            if model.dtype not in _DTYPES:
                raise EngineError(
                    f"{model.name} of dtype {model.dtype}", f"dtype {' or '.join(_DTYPES)}", _DO
                )
        check_threads(num_threads, "num_threads")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded: tuple[Any, Any]
        operators: Any
        link: HostLink | DeviceLink = HostLink()
        rows = manifest.rectangle.rows if manifest.rectangle and backend != "eager" else None
        if backend in ON_GPU:
            graphs = cuda_device()
            limits = fit_device(
                manifest, graphs, capture or CaptureLimits(), max_num_seqs, kv_cache_tokens
            )
            operators, link = DeviceOperators(graphs), DeviceLink(graphs)
            cache = _make_cache(
                manifest, max_num_seqs, graphs.device, rows, num_tokens=kv_cache_tokens
            )
            load = load_programs if backend == "cuda" else load_trt_programs
            loaded = load(path, manifest, cache, _caches(manifest, cache), graphs, limits)
        else:
            cache = _make_cache(
                manifest,
                max_num_seqs,
                torch.device("cpu"),
                rows,
                grows=rows is not None and can_grow(),
                num_tokens=kv_cache_tokens,
            )
            operators = torch.ops.specc
            if backend != "eager" and manifest.native is not None:
                # before anything is imported that wraps what the library brings
                library = manifest.native.library
                native.load(path / library, manifest.files[library].sha256)
                operators = torch.ops.specc_cpu
            if rows is None:
                loaded = _load_host_programs(path, manifest, backend, _caches(manifest, cache))
            else:
                caches_of = functools.partial(_layer_caches, cache=cache)
                loaded = load_onnx_programs(path, manifest, cache, caches_of, operators)
        models: dict[str, Any] = loaded[0]
        steps: dict[str, Any] = loaded[1]
        for plan in manifest.plans:
            if (step := steps[plan.name]).plan != plan.plan:
                raise EngineError(f"{plan.file} holds {step.plan}", f"plan {plan.name}", _DO)
        if OFF.name not in steps:
            raise EngineError(f"plans {', '.join(steps)}", f"plan {OFF.name} among them", _DO)
        target, *drafts = models.values()
        return cls(
            target=target,
            drafts=drafts,
            steps=steps,
            cache=cache,
            default_plan=manifest.default_plan,
            prefill_chunk=manifest.limits.prefill_chunk,
            vocab_size=manifest.models[0].vocab_size,
            position_limit=min(
                cache.shape.max_seq_len, *(model.max_position for model in manifest.models)
            ),
            tokenizer=_load_tokenizer(path, manifest.tokenizer.file),
            eos_token_ids=frozenset(manifest.tokenizer.eos_token_ids),
            bos_token_id=manifest.tokenizer.bos_token_id,
            add_bos=manifest.tokenizer.add_bos,
            manifest=manifest,
            backend=backend,
            operators=operators,
            mapped_weights=tuple(
                model.weights
                for model in models.values()
                if isinstance(model.weights, MappedWeights)
            ),
            profile=_load_profile(path, manifest, steps),
            directory=path,
            link=link,
        )


def _load_host_programs(
    path: Path, manifest: Manifest, backend: str, caches: Mapping[str, LayerCaches]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Models and steps; for the backend cpu, the native library is loaded."""
    models: dict[str, Any]
    step_class: Any
    if backend == "eager":
        step_class = StepProgram
        models = {
            model.name: ModelProgram.load(path / model.dir, caches[model.name])
            for model in manifest.models
        }
    else:
        from specc.runtime.backends.cpu.compiled_program import CompiledProgram, CompiledStep

        step_class = CompiledStep
        models = {
            model.name: CompiledProgram.load(
                path / model.dir, caches[model.name], manifest.files[model.package_file].sha256
            )
            for model in manifest.models
        }
    return models, {plan.name: step_class.load(path / plan.file, models) for plan in manifest.plans}


def _make_cache(
    manifest: Manifest,
    max_num_seqs: int | None,
    device: torch.device,
    rows: CacheRows | None = None,
    grows: bool = False,
    num_tokens: int | None = None,
) -> KVCache:
    limits = manifest.limits
    if max_num_seqs is None:
        max_num_seqs = limits.max_batch_size
    if not 1 <= max_num_seqs <= limits.max_batch_size:
        raise ConfigError(
            f"max_num_seqs {max_num_seqs}",
            f"1 … {limits.max_batch_size}, the engine's max_batch_size",
            "choose a number in this range, or compile with a larger --max-batch-size",
        )
    max_seq_len = min(limits.max_seq_len, manifest.models[0].max_position)
    shape = CacheShape(max_seq_len, limits.max_nodes, limits.block_size, max_num_seqs)
    if num_tokens is not None:
        shape = _shape_of(shape, num_tokens)
    specs = {
        model.name: [(s.num_layers, s.num_kv_heads, s.head_dim) for s in model.slabs]
        for model in manifest.models
    }
    dtypes = {model.name: _DTYPES[model.dtype] for model in manifest.models}
    return KVCache(shape, specs, dtypes, device, rows, grows)


def _shape_of(shape: CacheShape, num_tokens: int) -> CacheShape:
    """Raises ConfigError: a cache that has no blocks, or fewer or more than can be of use."""
    most = shape.num_blocks * shape.rows_per_block
    if not shape.block_size or not shape.block_size <= num_tokens <= most:
        raise ConfigError(
            f"kv_cache_tokens {num_tokens}"
            + ("" if shape.block_size else ", and a cache of one block a sequence"),
            f"{shape.block_size} … {most}, what {shape.max_num_seqs} sequences can need"
            if shape.block_size
            else "an engine whose cache has blocks: --block-size 16 at compile",
            "choose a number in this range, or lower max_num_seqs",
        )
    return dataclasses.replace(shape, pool_blocks=num_tokens // shape.block_size)


def _caches(manifest: Manifest, cache: KVCache) -> dict[str, LayerCaches]:
    return {model.name: _layer_caches(model, cache) for model in manifest.models}


def _layer_caches(model: ModelEntry, cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    slabs = cache.slabs[model.name]
    pairs = [slabs[layer.slab][layer.index] for layer in model.layers]
    return [(pair[0], pair[1]) for pair in pairs]


def _load_profile(path: Path, manifest: Manifest, steps: Mapping[str, Step]) -> dict[str, Any]:
    """Raises EngineError: a profile that names plans which the engine does not have."""
    if PROFILE_FILE not in manifest.files:
        return {}
    profile = read_json(path / PROFILE_FILE)
    plans = profile.get("plans")
    family = plans if isinstance(plans, dict) and all(map(str.isdigit, plans)) else {}
    if not family or not set(family.values()) <= steps.keys():
        raise EngineError(
            f"{path / PROFILE_FILE} with plans {plans}",
            f"batch sizes, and plans of this engine: {', '.join(steps)}",
            "run specc tune again",
        )
    return profile


def _load_tokenizer(directory: Path, file: str | None) -> Tokenizer | None:
    if file is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(directory / file))
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise EngineError(f"{directory / file}: {error}", "a tokenizer.json", _DO) from error
    # settings of training runs: a prompt must neither be cut nor padded silently
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
