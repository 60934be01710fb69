"""Writing an engine directory: whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from specc.artifact.manifest import MANIFEST_FILE, Manifest
from specc.artifact.manifest_checks import check_relative
from specc.artifact.manifest_entries import FileEntry, ParallelEntry
from specc.errors import OutputError
from specc.system.files import (
    exchange,
    fsync_path,
    hash_file,
    output_error,
    parents_of,
    remove_stale,
    sample_file,
)
from specc.system.json_file import parse_json
from specc.system.owned_directory import other_owned, owned_directory

# outputs that this process is writing
_active: set[Path] = set()
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class EngineWriter:
    """Builds an engine beside its destination, then renames it into place.

        with EngineWriter(output) as writer:
            entry = write_weights(…, writer.path("target/weights.safetensors"))
            writer.record("target/weights.safetensors", entry)
            writer.write_json("target/program.json", program)
            writer.commit(manifest)

    Leaving the block without `commit`, by an exception, Ctrl-C, SIGTERM or SIGHUP, removes what
    was built. Only SIGKILL or a power cut leave the hidden staging directory; the next writer of
    the same output removes it. An engine that is replaced is in its place until the moment that
    the new one is, where the file system can swap two directories.

    Args:
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

    def record(self, name: str, entry: FileEntry) -> None:
        """State what was computed while writing, so that the file is not read again."""
        self._recorded[name] = entry

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
        self.record(name, entry)

    def seal(self, manifest: Manifest) -> Manifest:
        """Hash all files and write the manifest: `staging` is then an engine that can be tried.

        Returns:
            the manifest with its `files`.
        Raises:
            OutputError: the disk is full.
        """
        try:
            names = sorted(name for name in _walk(self.staging) if name != MANIFEST_FILE)
            manifest = dataclasses.replace(
                manifest,
                files={n: self._entry(n) for n in names},
                parallel=self._sampled(manifest),
            )
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

    def _sampled(self, manifest: Manifest) -> ParallelEntry | None:
        """What the manifest says of ranks, with samples of their weights."""
        if manifest.parallel is None:
            return None
        samples = {name: sample_file(self.staging / name) for name in manifest.rank_files}
        return dataclasses.replace(manifest.parallel, samples=samples)

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


def _to_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def _walk(directory: Path) -> Iterator[str]:
    for root, _, names in os.walk(directory):
        for name in names:
            yield (Path(root) / name).relative_to(directory).as_posix()


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside of the block, unless somebody handles them.

    Only the main thread may set handlers: in others this does nothing.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
