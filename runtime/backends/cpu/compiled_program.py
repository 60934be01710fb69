"""A model's compiled program: as the backend eager has it, without Python inside."""

from __future__ import annotations

import contextlib
import io
import os
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.program_files import bind_weights, check_program, takes_mass
from specc.system.files import format_bytes, read_checked, sealed_copy
from specc.system.owned_directory import temporary_directory

_DO = "compile the engine again"
# position of `ancestors` in the inputs of a program
_ANCESTORS = 5
# values of a loop that take a thread as long as sharing them among threads does
_WORK_OF_BARRIERS = 41_000
# the first version that loads a package which is a directory
_DIRECTORIES_SINCE = (2, 13)


class CompiledProgram:
    """A model's package with its weights and caches bound; needs the native library loaded.

    Args:
        program: content of `program.json`, which names the inputs.
        package: the compiled `.pt2`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        sha256: of the package, where that is known.
        unpacked: where `unpacked_package` has it, for programs that share a package.
    Raises:
        EngineError: the package cannot be loaded or was altered, or an input has no weight.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        package: Path,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        sha256: str | None = None,
        unpacked: str | None = None,
    ) -> None:
        check_program(program, len(caches))
        self.name: str = program["name"]
        self.weights = weights
        try:
            with (
                unpacked_package(package, sha256)
                if unpacked is None
                else contextlib.nullcontext(unpacked)
            ) as path:
                self.native = torch.classes.specc.CompiledProgram(path)
        except RuntimeError as error:
            raise EngineError(
                f"{package} cannot be loaded: {str(error).strip().splitlines()[0]}",
                f"a program that AOTInductor compiled with torch {torch.__version__}",
                _DO,
            ) from error
        bound = bind_weights(program, weights)
        # torch keeps a reference to each bound tensor that nothing ever drops: these share the
        # memory of the weights, and let go of it when the program goes
        # (the stubs of set_ know neither of its two forms here)
        aliases = [torch.empty(0, dtype=w.dtype).set_(w) for w in bound]  # type: ignore[call-overload]
        weakref.finalize(self, _release, aliases).atexit = False
        names = {f"w{i}": alias for i, alias in enumerate(aliases)}
        used = self.native.weight_names()
        if unknown := sorted(set(used) - names.keys()):
            raise EngineError(
                f"{package} reads {unknown[0]}", f"one of {len(names)} weights of program.json", _DO
            )
        self.native.bind_weights(used, [names[name] for name in used])
        self.native.expect_flat_inputs(takes_mass(program))
        self.native.set_narrow_rows(narrow_rows(program))
        for entry in program["inputs"]:
            if entry["name"] in ("hidden", "feature_rows") and entry["kind"] == "input":
                # one more input, last
                sizes = [-1 if size is None else size for size in entry["shape"]]
                like = torch.empty(0, dtype=getattr(torch, entry["dtype"]))
                self.native.expect_hidden(sizes, like)
        self.native.bind_caches(
            [
                caches[entry["layer"]][entry["part"] == "v"]
                for entry in program["inputs"]
                if entry["kind"] == "cache"
            ]
        )

    def __call__(self, *inputs: Tensor | None, hidden: Tensor | None = None) -> Tensor:
        """Run over flat tokens; inputs and result are those of `ModelProgram.forward`."""
        given = with_ancestors(inputs)
        return self.native.run(given if hidden is None else [*given, hidden])

    def call_in(self, runner: Any, result: int) -> None:
        """Let a native runner of steps call it; arguments follow."""
        runner.call_program(self.native, result)


def narrow_rows(program: Mapping[str, Any]) -> int:
    """Rows of a pass up to which loops between products take less time than barriers of threads.

    Loops go over as many values of a row as the widest product takes, in feed-forward blocks;
    more threads gain where rows × width is above 24,000, and at 64 rows in any case: measured with
    two threads at widths of 768 and 5120 (docs/cpu.md).

    Args:
        program: content of `program.json`.
    """
    widths = [1]
    for entry in program["inputs"]:
        if entry["kind"] == "weight":
            matrix = entry.get("blocks_of") or entry.get("quantized_of") or entry["shape"]
            widths += matrix[-1:] if len(matrix) >= 2 else []
    return min(64, max(1, _WORK_OF_BARRIERS // max(widths)))


def with_ancestors(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Inputs of a pass as native programs take them: no ancestors are none of width 0."""
    given = list(inputs)
    if given[_ANCESTORS] is None:
        # no words at all: causal
        assert given[0] is not None
        given[_ANCESTORS] = torch.empty(given[0].shape[0], 0, dtype=torch.int64)
    return given  # type: ignore[return-value]


@torch.inference_mode()
def _release(aliases: Iterable[Tensor]) -> None:
    for alias in aliases:
        alias.set_()  # type: ignore[call-overload]


@contextlib.contextmanager
def unpacked_package(package: Path, sha256: str | None = None) -> Iterator[str]:
    """A path from which torch can load a package for the CPU inside of the block.

    Torch would unpack a package by itself for as long as it is loaded, so that a process that is
    killed leaves megabytes in the temporary directory. What is mapped needs no file any more: here
    only this process can write to the files, and nothing is left by the time that a package runs.

    Args:
        package: the `.pt2`.
        sha256: of its bytes, where that is known.
    Raises:
        EngineError: it cannot be read, was altered, is no package, or cannot be unpacked.
    """
    data = read_checked(package, sha256)
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise _no_package(package, error) from error
    num_bytes = sum(entry.file_size for entry in archive.infolist())
    with contextlib.ExitStack() as stack:
        try:
            if _torch_version() >= _DIRECTORIES_SINCE:
                directory = stack.enter_context(temporary_directory())
                archive.extractall(directory)
                path = str(directory)
            else:
                path, descriptor = sealed_copy(data, package.name)
                stack.callback(os.close, descriptor)
        except zipfile.BadZipFile as error:
            raise _no_package(package, error) from error
        except OSError as error:
            raise EngineError(
                f"unpacking {package} into the temporary directory failed: {error}",
                f"{format_bytes(num_bytes)} in a directory that this user may write to",
                "free some space, or set TMPDIR to a directory on another file system",
            ) from error
        yield path


def _no_package(package: Path, error: Exception) -> EngineError:
    return EngineError(
        f"{package} cannot be loaded: {error}",
        f"a program that AOTInductor compiled with torch {torch.__version__}",
        "compile the engine again",
    )


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
