"""Passes of a model on a GPU by code that AOTInductor compiled, where the engine has it.

Experimental: no GPU has shown it. An engine of `--backend aot-inductor` is one for CUDA with
packages beside its programs, each for the shapes of one pass. Whatever has no package runs the
program's graph: prefill, and batches that no graph is captured for.
"""

from __future__ import annotations

import io
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.program_files import bind_weights, check_schema, read_json
from specc.system.files import read_checked

INDEX_FILE = "packages.json"
INDEX_SCHEMA_VERSIONS = (1,)
# shapes of the inputs of a pass; absent ancestors have none
Shapes = tuple[tuple[int, ...] | None, ...]


class PackageWarning(UserWarning):
    """An engine's compiled code does not serve this process, which runs its graphs."""


class PackageRunner(Protocol):
    """A loaded package: torch's `AOTICompiledModel`."""

    def __call__(self, inputs: Sequence[Tensor | None], caches: Sequence[Tensor]) -> Tensor: ...

    def get_constant_fqns(self) -> list[str]: ...

    def load_constants(
        self, constants_map: dict[str, Tensor], *, check_full_update: bool, user_managed: bool
    ) -> None: ...


# content, device → the package, with nothing bound
Load = Callable[[bytes, torch.device], PackageRunner]
Stream = Callable[[torch.device], int]


def load_package(data: bytes, device: torch.device) -> PackageRunner:
    """Load a package for one stream: what it has to keep other threads out cannot be captured."""
    import torch._inductor

    index = -1 if device.index is None else device.index
    return torch._inductor.aoti_load_package(
        io.BytesIO(data), run_single_threaded=True, device_index=index
    )


def current_stream(device: torch.device) -> int:
    """Handle of the stream that this thread launches on."""
    return torch.cuda.current_stream(device).cuda_stream


def load_model(
    engine: Path,
    directory: str,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
    hashes: Mapping[str, str],
) -> ModelProgram:
    """A model's program, with its packages if they are for this device and these caches.

    Args:
        engine: directory of the engine.
        directory: of the model in it.
        weights: key → tensor on the device.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        device: that weights and caches lie on.
        hashes: file of the engine → its sha256 in hex.
    Raises:
        EngineError: a file is absent or cannot be read.
    """
    program = read_json(engine / directory / "program.json")
    file = engine / directory / INDEX_FILE
    index = read_json(file)
    check_schema(index, INDEX_FILE, INDEX_SCHEMA_VERSIONS)
    packages = {
        _shapes_of(entry["inputs"]): (engine / entry["file"], _hash_of(entry["file"], hashes, file))
        for entry in index["packages"]
    }
    result = CompiledCudaProgram(program, packages, weights, caches, device)
    if (reason := _mismatch(index, result.cache_tensors, device)) is not None:
        warnings.warn(
            f"the compiled code of {result.name} is not used: {reason}",
            PackageWarning,
            stacklevel=2,
        )
        return ModelProgram(program, weights, caches, device)
    return result


class CompiledCudaProgram(ModelProgram):
    """A model's program that runs the passes of these shapes by compiled code.

    A package is loaded at the first pass of its shapes on a stream, and each stream has its own:
    a package loaded for one thread keeps its state unguarded.

    Args:
        program: content of `program.json`.
        packages: shapes of a pass → package and its sha256 in hex.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        device: that weights and caches lie on.
        load: loads a package.
        stream: handle of the current stream.
        is_capturing: whether it is being captured.
    Raises:
        EngineError: an input has no weight, or one of another shape or dtype.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        packages: Mapping[Shapes, tuple[Path, str]],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
        load: Load = load_package,
        stream: Stream = current_stream,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        super().__init__(program, weights, caches, device)
        self.cache_tensors = [
            caches[entry["layer"]][entry["part"] == "v"]
            for entry in program["inputs"]
            if entry["kind"] == "cache"
        ]
        # torch may keep a reference to what is bound: these share the memory of the weights, and
        # let go of it when the program goes
        aliases = [
            torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight)  # type: ignore[call-overload]
            for weight in bind_weights(program, weights)
        ]
        weakref.finalize(self, _release, aliases).atexit = False
        self._constants = {f"w{i}": alias for i, alias in enumerate(aliases)}
        self._packages = dict(packages)
        self._runners: dict[tuple[Shapes, int], PackageRunner] = {}
        self._device = device
        self._load = load
        self._stream = stream
        self._is_capturing = is_capturing

    def forward(self, *inputs: Tensor | None) -> Tensor:  # type: ignore[override]
        """One pass; inputs and result are those of `ModelProgram.forward`."""
        shapes = _shapes_of(None if x is None else x.shape for x in inputs)
        if shapes not in self._packages:
            return super().forward(*inputs)  # type: ignore[arg-type]
        # the code knows strides, too: those of tensors that are laid out in one piece
        given = [None if x is None else x.contiguous() for x in inputs]
        return self._runner(shapes)(given, self.cache_tensors)

    def _runner(self, shapes: Shapes) -> PackageRunner:
        key = (shapes, self._stream(self._device))
        if (runner := self._runners.get(key)) is None:
            if self._is_capturing():
                # loading allocates and may wait, and kernels are loaded by the first run
                raise RuntimeError("a package that did not run on this stream before its capture")
            # read as late as this, it may be that of an engine which took this one's place
            runner = self._load(read_checked(*self._packages[shapes]), self._device)
            used = {name: self._constants[name] for name in runner.get_constant_fqns()}
            runner.load_constants(used, check_full_update=True, user_managed=True)
            self._runners[key] = runner
        return runner


def _hash_of(name: str, hashes: Mapping[str, str], index: Path) -> str:
    """Code is run only where the manifest lists it."""
    if name not in hashes:
        raise EngineError(
            f"{index} names {name}, which the manifest does not list",
            "packages that are files of the engine",
            "compile the engine again",
        )
    return hashes[name]


def _mismatch(
    index: Mapping[str, Any], caches: Sequence[Tensor], device: torch.device
) -> str | None:
    """Why packages do not serve here; None where they do."""
    if device.type == "cuda":
        found = list(torch.cuda.get_device_capability(device))
        if index.get("capability") != found:
            needed = ".".join(map(str, index.get("capability") or ["another"]))
            return f"it is for GPUs of capability {needed}, this one's is {found[0]}.{found[1]}"
    for cache, needed in zip(caches, index["caches"], strict=True):
        if list(cache.shape) != needed:
            # sizes are part of the code
            return f"it is for caches {needed}, these are {list(cache.shape)} (max_num_seqs?)"
        if not cache.is_contiguous() or cache.data_ptr() % 16:
            return "a cache does not begin at a multiple of 16 bytes, and would be copied"
    return None


def _shapes_of(shapes: Iterable[Sequence[int] | None]) -> Shapes:
    return tuple(None if shape is None else tuple(shape) for shape in shapes)


@torch.inference_mode()
def _release(aliases: Iterable[Tensor]) -> None:
    for alias in aliases:
        alias.set_()  # type: ignore[call-overload]
