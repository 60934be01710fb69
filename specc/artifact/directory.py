"""The engine directory: written whole or not at all, and checked before anything in it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from specc.artifact.manifest import MANIFEST_FILE, ON_GPU, FileEntry, Manifest, check_relative
from specc.artifact.safetensors_io import Progress
from specc.errors import EngineError, OutputError
from specc.system.files import (
    exchange,
    format_bytes,
    fsync_path,
    hash_file,
    output_error,
    parents_of,
    remove_stale,
)
from specc.system.json_file import parse_json, read_json
from specc.system.machine import cpu_model, isa_flags
from specc.system.owned_directory import other_owned, owned_directory
from specc.system.signals import unwind_on_signals

BACKENDS = ("cpu", "cuda", "eager", "onnx", "tensorrt")

# outputs that this process is writing
_active: set[Path] = set()


def torch_version() -> str:
    """Version of the installed torch without its local part: `2.13.0`."""
    return re.split(r"[^\d.]", torch.__version__)[0].rstrip(".")


class EngineWriter:
    """Builds an engine beside its destination, then renames it into place.

        with EngineWriter(output) as writer:
            sha256, num_bytes = write_weights(…, writer.path("target/weights.safetensors"))
            writer.record("target/weights.safetensors", sha256, num_bytes)
            writer.write_json("target/program.json", program)
            writer.commit(manifest)

    Leaving the block without `commit`, by an exception, Ctrl-C, SIGTERM or SIGHUP, removes what
    was built. Only SIGKILL or a power cut leave the hidden staging directory; the next writer of
    the same output removes it. An engine that is replaced is in its place until the moment that
    the new one is, where the file system can swap two directories.

    Args:
        output: the engine directory to make.
        force: replace an existing engine (never another kind of directory).
    Raises:
        OutputError: the output exists, or cannot be written.
    """

    def __init__(self, output: str | Path, force: bool = False) -> None:
        self.output = Path(output).resolve()
        self.force = force
        # until it is entered, where nothing is
        self.staging = self.output.parent / f".{self.output.name}.partial"
        self._stack = contextlib.ExitStack()
        self._old = self.output.parent / f".{self.output.name}.old-{os.getpid()}"
        self._recorded: dict[str, FileEntry] = {}

    def __enter__(self) -> EngineWriter:
        try:
            self._check_parent()
            self._check_output()
        except OSError as error:  # a name that the file system does not take
            raise output_error(self.output, error) from error
        if self.output in _active:
            raise OutputError(
                f"{self.output} is being written by this process",
                "one writer for each output",
                "wait for it, or choose another output directory",
            )
        remove_stale(self.output)
        self._check_output()
        try:
            self._stack.enter_context(unwind_on_signals())
            _active.add(self.output)
            self._stack.callback(_active.discard, self.output)
            self._stack.enter_context(parents_of(self.output))
            prefix = f"{self.staging.name}-"
            # the engine is for everybody that the user's mask lets in
            self.staging = self._stack.enter_context(
                owned_directory(self.output.parent, prefix, mode=0o777)
            )
            self._refuse_another(prefix)
        except BaseException as error:
            self._stack.close()
            if isinstance(error, OSError):
                raise output_error(self.output, error) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _refuse_another(self, prefix: str) -> None:
        """Raises OutputError: another process writes the same output."""
        if (other := other_owned(self.output.parent, prefix, self.staging)) is not None:
            raise OutputError(
                f"{self.output} is being written by another process (in {other})",
                "one writer for each output",
                "wait for it, or choose another output directory",
            )

    def path(self, name: str) -> Path:
        """Where to write a file of the engine; its directory exists."""
        check_relative(name)
        if name == MANIFEST_FILE:
            raise ValueError("commit writes the manifest")
        path = self.staging / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise output_error(path, error) from error
        return path

    def record(self, name: str, sha256: str, num_bytes: int) -> None:
        """State a hash that was computed while writing, so that the file is not read again."""
        self._recorded[name] = FileEntry(sha256, num_bytes)

    def write_bytes(self, name: str, data: bytes) -> None:
        path = self.path(name)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise output_error(path, error) from error

    def write_json(self, name: str, data: Any) -> None:
        self.write_bytes(name, _to_json(data))

    def copy_file(self, source: Path, name: str) -> None:
        """Copy a small file (tokenizer, configuration) into the engine."""
        self.write_bytes(name, source.read_bytes())

    def link_file(self, source: Path, name: str, entry: FileEntry) -> None:
        """Take over a file of another engine, whose entry is known, without copying where it goes.

        Raises:
            OutputError: the disk is full.
        """
        path = self.path(name)
        try:
            try:
                os.link(source, path)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source, path)
        except OSError as error:
            raise output_error(path, error) from error
        self.record(name, entry.sha256, entry.bytes)

    def seal(self, manifest: Manifest) -> Manifest:
        """Hash all files and write the manifest: `staging` is then an engine that can be tried.

        Returns:
            the manifest with its `files`.
        Raises:
            OutputError: the disk is full.
        """
        try:
            names = sorted(name for name in _walk(self.staging) if name != MANIFEST_FILE)
            manifest = dataclasses.replace(manifest, files={n: self._entry(n) for n in names})
            data = manifest.to_json()
            Manifest.from_json(parse_json(_to_json(data), exact=True))
            (self.staging / MANIFEST_FILE).write_bytes(_to_json(data))
        except OSError as error:
            raise output_error(self.output, error) from error
        return manifest

    def commit(self, manifest: Manifest) -> Manifest:
        """Seal, make everything durable and rename.

        Returns:
            the manifest with its `files`.
        Raises:
            OutputError: the disk is full, or the output has appeared meanwhile.
        """
        manifest = self.seal(manifest)
        try:
            for name in (*manifest.files, MANIFEST_FILE):
                fsync_path(self.staging / name)
            for directory, _, _ in os.walk(self.staging):
                fsync_path(Path(directory))
            self._publish()
            fsync_path(self.output.parent)
        except OSError as error:
            raise output_error(self.output, error) from error
        return manifest

    def _entry(self, name: str) -> FileEntry:
        path, recorded = self.staging / name, self._recorded.get(name)
        size = path.stat().st_size
        if recorded is None:
            return FileEntry(hash_file(path), size)
        if recorded.bytes != size:
            raise ValueError(f"{name} has {size} bytes, {recorded.bytes} were recorded")
        return recorded

    def _publish(self) -> None:
        self._check_output()
        if not self.output.exists():
            self.staging.rename(self.output)
            return
        if exchange(self.staging, self.output):
            return  # what was there goes as everything that is left in the staging directory
        try:
            self.output.rename(self._old)
            self.staging.rename(self.output)
        except BaseException:
            if self._old.exists() and not self.output.exists():
                self._old.rename(self.output)
            raise
        # the new engine is in place: what cannot be deleted is left to the next writer
        shutil.rmtree(self._old, ignore_errors=True)

    def _check_parent(self) -> None:
        # what is missing of the way there is made; see `parents_of`
        parent = next(p for p in self.output.parents if p.exists())
        if not parent.is_dir():
            raise OutputError(
                f"{parent} is no directory", "one to write the engine into", "choose another output"
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(
                f"{parent} is not writable",
                "a directory that this user may write to",
                "choose another output directory",
            )

    def _check_output(self) -> None:
        if not self.output.exists():
            return
        if not (self.output / MANIFEST_FILE).is_file():
            raise OutputError(
                f"{self.output} exists and is no engine, which not even --force replaces",
                "an output path that is free, or an engine",
                "choose another output directory",
            )
        if not self.force:
            raise OutputError(
                f"{self.output} exists",
                "an output path that is free",
                "choose another output, or pass --force to replace this engine",
            )


def open_engine(
    path: str | Path,
    verify: bool | None = None,
    *,
    backend: str | None = None,
    backends: Collection[str] = BACKENDS,
    available_memory: int | None = None,
    max_num_seqs: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Read the manifest and check the engine against it, this machine and this installation.

    Args:
        path: the engine directory.
        verify: compare the sha256 of every file; None leaves out the weights, which are mapped
            and not read; False checks presence and size alone, as all do.
        backend: what will run; None is the manifest's own. Every engine holds eager graphs.
        backends: backends that the caller can run.
        available_memory: bytes; None asks the system, where it tells.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        progress: called with (bytes hashed, bytes in total).
    Raises:
        EngineError: the directory is no engine, was made for another runtime, was altered, or
            needs more memory than there is.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_runtime(manifest, manifest.backend if backend is None else backend, backends)
    if available_memory is None:
        available_memory = available_memory_bytes()
    if (backend or manifest.backend) not in ON_GPU and available_memory is not None:
        _check_memory(manifest, available_memory, max_num_seqs)
    for name, entry in manifest.files.items():
        _check_file(path, name, entry)
    if verify is not False:
        weights = () if verify else [model.weights_file for model in manifest.models]
        hashed = {name: e for name, e in manifest.files.items() if name not in weights}
        _check_hashes(path, hashed, progress)
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
    data = read_json(file, EngineError, "a manifest", do, exact=True)
    try:
        return Manifest.from_json(data)
    except EngineError as error:
        raise EngineError(f"{file}: {error.found}", error.needed, error.do) from error


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
    if manifest.torch_version != torch_version():
        raise EngineError(
            f"an engine for torch {manifest.torch_version}, and torch {torch_version()}",
            "the same version",
            f"install torch {manifest.torch_version}, or {again}",
        )
    if manifest.backend not in backends:
        raise EngineError(
            f"an engine for backend {manifest.backend}", f"one of {', '.join(backends)}", again
        )
    if backend not in (manifest.backend, "eager"):
        raise EngineError(
            f"backend {backend} and an engine for backend {manifest.backend}",
            f"{manifest.backend} or eager",
            "leave out the backend"
            if backend not in backends
            else f"compile the engine again with --backend {backend}",
        )
    if manifest.native is not None and backend != "eager":
        _check_isa(manifest.native.isa_flags)
    kind = manifest.device.split(":")[0]
    # graphs of a GPU's engine run on the CPU, too, operator by operator
    has_device = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    if not has_device and not (kind == "cuda" and backend == "eager"):
        raise EngineError(
            f"an engine for device {manifest.device}, which torch does not see on this machine",
            "an engine for this machine's devices",
            f"run it on a machine that has one, run its graphs with --backend eager, or {again}",
        )


def _check_isa(needed: Collection[str]) -> None:
    lacking = sorted(set(needed) - set(isa_flags()))
    if lacking:
        raise EngineError(
            f"this CPU ({cpu_model()}) lacks {', '.join(lacking)}",
            "the instruction sets of the machine that compiled the engine",
            "compile the engine again on this machine, or run its graphs with --backend eager",
        )


def _check_memory(manifest: Manifest, available: int, max_num_seqs: int | None) -> None:
    limits = manifest.limits
    needed = manifest.total_memory
    if max_num_seqs is not None:
        caches = sum(entry.cache for entry in manifest.memory_plan.values())
        unused = limits.max_batch_size - min(max_num_seqs, limits.max_batch_size)
        needed -= caches * unused // limits.max_batch_size
    if needed > available:
        raise EngineError(
            f"{format_bytes(available)} of memory available",
            f"{format_bytes(needed)} for max_batch_size {max_num_seqs or limits.max_batch_size} "
            f"and max_seq_len {limits.max_seq_len}",
            "compile with a smaller --max-batch-size or --max-seq-len, or free memory",
        )


def _check_file(path: Path, name: str, entry: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise _altered(f"{file} is missing", f"a file of {entry.bytes} bytes")
    size = file.stat().st_size
    if size != entry.bytes:
        raise _altered(f"{file} has {size} bytes", f"{entry.bytes} bytes")


def _check_hashes(path: Path, files: Mapping[str, FileEntry], progress: Progress | None) -> None:
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


def _altered(found: str, needed: str) -> EngineError:
    do = "compile or copy the engine again"
    return EngineError(found, f"{needed}, as {MANIFEST_FILE} says", do)


def _to_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def _walk(directory: Path) -> Iterator[str]:
    for root, _, names in os.walk(directory):
        for name in names:
            yield (Path(root) / name).relative_to(directory).as_posix()
