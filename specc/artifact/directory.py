"""Opening an engine directory: checked before anything in it is used, and not replaced since."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.manifest import INSTRUCTIONS_VERSION, MANIFEST_FILE, Manifest
from specc.artifact.manifest_entries import FileEntry
from specc.artifact.safetensors_io import Progress
from specc.close_name import advice
from specc.errors import EngineError
from specc.system.files import format_bytes, hash_file, sample_file
from specc.system.json_file import read_engine_json
from specc.version import __version__


def torch_version() -> str:
    """Version of the installed torch without its local part: `2.13.0`."""
    return re.split(r"[^\d.]", torch.__version__)[0].rstrip(".")


def open_engine(
    path: str | Path,
    verify: bool | None = None,
    *,
    backend: str | None = None,
    backends: Collection[str] | None = None,
    available_memory: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_tokens: int | None = None,
    weights_budget: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Read the manifest and check the engine against it, this machine and this installation.

    Args:
        verify: compare the sha256 of every file; None leaves out the weights, whose hash takes
            longest; False checks presence and size alone, as all do, and samples of files of ranks.
        backend: what will run; None is the manifest's own. Every engine holds eager graphs.
        backends: that the caller can run; None is all that are known.
        available_memory: bytes; None asks the system, where it tells.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        kv_cache_tokens: rows of all sequences together; None is what the engine has.
        weights_budget: bytes that weights of the target may take; None is all of them.
        progress: called with (bytes hashed, bytes in total).
    Raises:
        EngineError: the directory is no engine, was made for another runtime, was altered, or
            needs more memory than there is.
    """
    path = Path(path)
    manifest = read_manifest(path)
    backend = backend or manifest.backend
    _check_runtime(manifest, backend, backend_names() if backends is None else backends)
    if available_memory is None:
        available_memory = available_memory_bytes()
    if not facts_of(backend).is_on_gpu and available_memory is not None:
        _check_memory(manifest, available_memory, max_num_seqs, kv_cache_tokens, weights_budget)
    for name, entry in manifest.files.items():
        _check_file(path, name, entry)
    _check_rank_files(path, manifest)
    if verify is not False:
        weights = () if verify else manifest.weights_files
        hashed = {name: e for name, e in manifest.files.items() if name not in weights}
        check_hashes(path, hashed, progress)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read and validate manifest.json alone.

    Raises:
        EngineError: it is absent, malformed, or of another schema version.
    """
    if not path.is_dir():
        state = "is no directory" if path.exists() else "does not exist"
        raise EngineError(f"{path} {state}", "an engine directory", "make one with specc compile")
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise EngineError(
            f"{path} is not an engine: it has no {MANIFEST_FILE}",
            "an engine directory",
            "make one with specc compile",
        )
    do = "check its permissions, or compile or copy the engine again"
    data = read_engine_json(file, "a manifest", do)
    try:
        return Manifest.from_json(data)
    except EngineError as error:
        raise EngineError(f"{file}: {error.found}", error.needed, error.do) from error


def check_hashes(path: Path, files: Mapping[str, FileEntry], progress: Progress | None) -> None:
    """Read files of an engine and compare them with what its manifest says.

    Args:
        files: name → content.
        progress: called with (bytes hashed, bytes in all).
    Raises:
        EngineError: one was altered, or cannot be read.
    """
    total, done = sum(entry.bytes for entry in files.values()), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress(done, total)

    for name, entry in files.items():
        try:
            sha256 = hash_file(path / name, advance)
        except OSError as error:
            raise EngineError(
                f"{path / name} cannot be read: {error.strerror}",
                "a readable file",
                "check its permissions and the disk",
            ) from error
        if sha256 != entry.sha256:
            raise _altered(f"{path / name} has sha256 {sha256}", f"sha256 {entry.sha256}")


def _check_rank_files(path: Path, manifest: Manifest) -> None:
    """Compare a few pages of each rank's weights: the files of a rank are easily mixed up."""
    samples = manifest.parallel.samples if manifest.parallel is not None else {}
    for name, sample in samples.items():
        try:
            found = sample_file(path / name)
        except OSError as error:
            raise EngineError(
                f"{path / name} cannot be read: {error.strerror}",
                "a readable file",
                "check its permissions and the disk",
            ) from error
        if found != sample:
            others = [other for other, theirs in samples.items() if theirs == found]
            what = f"is {others[0]}" if others else "is of another engine, or was altered"
            raise EngineError(
                f"{path / name} {what}",
                "the weights that this rank had when the engine was made",
                "copy the engine's directory again, or compile it again",
            )


def available_memory_bytes() -> int | None:
    """Memory that programs can take without swapping; None where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None  # no Linux
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _check_runtime(manifest: Manifest, backend: str, backends: Collection[str]) -> None:
    again = "compile the engine again on this installation"
    if manifest.instructions != INSTRUCTIONS_VERSION:
        raise EngineError(
            f"an engine of instructions {manifest.instructions}, made by specc"
            f" {manifest.specc_version}",
            f"instructions {INSTRUCTIONS_VERSION}, of specc {__version__}",
            again,
        )
    is_data = manifest.backend in backend_names() and facts_of(manifest.backend).is_data
    if not is_data and manifest.specc_version != __version__:
        # a graph calls operators by name, and what they mean is that version's
        raise EngineError(
            f"an engine of specc {manifest.specc_version}, and specc {__version__}",
            "the same version",
            f"install specc-llm {manifest.specc_version}, or {again}",
        )
    if not is_data and manifest.torch_version != torch_version():
        raise EngineError(
            f"an engine for torch {manifest.torch_version}, and torch {torch_version()}",
            "the same version",
            f"install torch {manifest.torch_version}, or {again}",
        )
    if manifest.backend not in backends:
        raise EngineError(
            f"an engine for backend {manifest.backend}", f"one of {', '.join(backends)}", again
        )
    for_all = [name for name in backend_names() if facts_of(name).runs_all]
    runs_all = backend in for_all
    if backend != manifest.backend and not runs_all:
        raise EngineError(
            f"backend {backend} and an engine for backend {manifest.backend}",
            " or ".join(takers := dict.fromkeys([manifest.backend, *for_all])),
            advice(backend, takers, "leave out the backend")
            if backend not in backends
            else f"compile the engine again with --backend {backend}",
        )
    kind = manifest.device.split(":")[0]
    # graphs of a GPU's engine run on the CPU, too, operator by operator
    has_device = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    if not has_device and not (kind == "cuda" and runs_all):
        raise EngineError(
            f"an engine for device {manifest.device}, which torch does not see on this machine",
            "an engine for this machine's devices",
            f"run it on a machine that has one, run its graphs with --backend eager, or {again}",
        )


def _check_memory(
    manifest: Manifest,
    available: int,
    max_num_seqs: int | None,
    kv_cache_tokens: int | None,
    weights_budget: int | None,
) -> None:
    limits = manifest.limits
    sizes = (max_num_seqs, kv_cache_tokens)
    # of a cut engine, what each rank takes at least: what starts them knows how many come here
    ranks = (0,) if manifest.parallel is None else (1,)
    needed = manifest.memory_of(ranks, *sizes, weights_budget)
    if needed > available:
        shares = ", load with a smaller --kv-cache-tokens" if limits.block_size else ""
        if manifest.segments is not None and weights_budget is None:
            shares += ", load with --offload-weights auto"
        raise EngineError(
            f"{format_bytes(available)} of memory available",
            f"{format_bytes(needed)} for max_batch_size {max_num_seqs or limits.max_batch_size} "
            f"and max_seq_len {limits.max_seq_len}, {limits.cache_rows(*sizes)} tokens of cache",
            f"compile with a smaller --max-batch-size or --max-seq-len{shares}, or free memory",
        )


def _check_file(path: Path, name: str, entry: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise _altered(f"{file} is missing", f"a file of {entry.bytes} bytes")
    size = file.stat().st_size
    if size != entry.bytes:
        raise _altered(f"{file} has {size} bytes", f"{entry.bytes} bytes")


def _altered(found: str, needed: str) -> EngineError:
    do = "compile or copy the engine again"
    return EngineError(found, f"{needed}, as {MANIFEST_FILE} says", do)


@contextlib.contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """What is read of an engine inside of the block belongs to one engine.

    Raises:
        EngineError: another one took its place meanwhile; this comes before errors that are due
            to it, such as absent files.
    """
    before = _identity(path)
    try:
        yield
    except Exception as error:
        if before is None or _identity(path) == before:
            raise
        raise _replaced(path) from error
    if _identity(path) != before:
        raise _replaced(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Tells an engine from one that takes its place; None where there is none."""
    try:
        directory, manifest = path.stat(), (path / MANIFEST_FILE).stat()
    except OSError:
        return None
    return directory.st_dev, directory.st_ino, manifest.st_ino, manifest.st_mtime_ns


def _replaced(path: Path) -> EngineError:
    return EngineError(
        f"{path} was replaced or removed while it was being loaded",
        "an engine that stays in its place until it is loaded",
        "try again when whatever writes it has finished",
    )
