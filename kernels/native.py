"""The CPU operators as C++: built once with the machine's compiler, cached by content, loaded once.

The library needs a C++ compiler and torch's headers where engines are compiled, and nothing but
torch where they run: an engine carries the library that its programs call.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
from pathlib import Path

import torch
from torch import Tensor

from specc.errors import CompilerError, EngineError
from specc.system.child_processes import ChildProcesses
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.file_cache import FileCache, default_cache_dir
from specc.system.files import is_full, read_checked, sealed_copy
from specc.system.machine import isa_flags

LIBRARY_NAME = "libspecc_cpu.so"
SOURCE_DIR = Path(__file__).parent / "cpu"
# no -ffast-math: it lets the compiler drop the tests that keep a poisoned row out of a sum
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
# where the last bit decides, as it does in sampling and in sums that have the bits of their oracle:
# rounded as it is written
_EXACT_FLAGS = (
    "-fno-associative-math",
    "-fno-reciprocal-math",
    "-fsigned-zeros",
    "-ffp-contract=off",
)
_EXACT_SOURCES = (
    "accept.cpp", "column_winners.cpp", "draft_children.cpp", "filters.cpp", "kv_rows.cpp",
    "linear_fp8.cpp", "linear_q.cpp",
    "node_winners.cpp", "noise.cpp", "penalties.cpp", "ranks_math.cpp",
)  # fmt: skip
# what includes torch's own C++ headers
_CLASSES = "torch_classes.cpp"
# it computes nothing itself: what it calls decides how fast a step is
_CLASSES_FLAGS = ("-O1",)
# operator → declaration of the C function that AOTInductor's code calls in its place
C_SHIMS = {
    "tree_attention": "AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle,"
    " AtenTensorHandle*, AtenTensorHandle*, double, int64_t, int64_t, double, int32_t, int64_t,"
    " int64_t, AtenTensorHandle*)",
    "attend_expanded": "AOTITorchError aoti_torch_cpu_attend_expanded(AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle,"
    " AtenTensorHandle*, int64_t, double, double, AtenTensorHandle*)",
    "block_mass": "AOTITorchError aoti_torch_cpu_block_mass(AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*,"
    " AtenTensorHandle, AtenTensorHandle, double, AtenTensorHandle*)",
    "linear": "AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle*, int64_t, AtenTensorHandle*)",
    "linear_q": "AOTITorchError aoti_torch_cpu_linear_q(AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle*, int64_t, int64_t, int64_t, int32_t, int32_t, int64_t, AtenTensorHandle*)",
    "grouped_mm_q": "AOTITorchError aoti_torch_cpu_grouped_mm_q(AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, int64_t, int64_t, int64_t, int32_t, int32_t,"
    " int64_t, AtenTensorHandle*)",
    "grouped_linear": "AOTITorchError aoti_torch_cpu_grouped_linear(AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*)",
    "embedding_of_blocks": "AOTITorchError aoti_torch_cpu_embedding_of_blocks(AtenTensorHandle,"
    " AtenTensorHandle, int64_t, int64_t, AtenTensorHandle*)",
    "write_rows": "AOTITorchError aoti_torch_cpu_write_rows(AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)",
    "take_rows": "AOTITorchError aoti_torch_cpu_take_rows(AtenTensorHandle, AtenTensorHandle,"
    " AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)",
    "all_reduce": "AOTITorchError aoti_torch_cpu_all_reduce(AtenTensorHandle, AtenTensorHandle*)",
}
# the sources that define what Python, compiled programs and steps call; kernels after the same
# operators may change, and an engine that carries older ones still loads
_INTERFACE = (
    "attend_expanded.cpp", "attention_tensors.h", "compiled_program.cpp", "compiled_program.h",
    "quantized_operators.cpp", "ranks_functions.cpp", "ranks_links.cpp", "ranks_operators.cpp",
    "ranks_segment.h", "register.cpp", "register_classes.cpp", "sampling_operators.cpp",
    "segments.cpp", "segments.h", "shims.h", "slab_row_operators.cpp", "step_operators.cpp",
    "step_runner.cpp", "step_runner.h", "tensors.h", "tree_operators.cpp", "weight_stream.cpp",
    "weight_stream.h",
)  # fmt: skip
_INTERFACE_MARK = b"specc-interface:"
# a source that another one includes has no object of its own
_INCLUDED = re.compile(r'(?m)^#include "(\w+\.cpp)"$')
# a line that is one, or the end of one; these sources have no string with two slashes
_LINE_COMMENT = re.compile(rb"(?m)^[ \t]*//.*\n|[ \t]*//.*$")
_loaded: tuple[str, ctypes.CDLL] | None = None


def build(cache_dir: Path | None = None) -> Path:
    """Path of the library for this machine, compiled where the cache has none.

    Args:
        cache_dir: where libraries are kept; None is `specc/` in the user's cache directory.
    Raises:
        CompilerError: no C++ compiler, one too old, or one that fails; or no cache.
    """
    name, _ = _build(cache_dir, ChildProcesses())
    return FileCache(cache_dir).path(name)


def build_library(children: ChildProcesses) -> bytes:
    """Content of the library for this machine; see `build`."""
    return _build(None, children)[1]


def _build(cache_dir: Path | None, children: ChildProcesses) -> tuple[str, bytes]:
    compiler = find_compiler()
    name = f"native/{_content_key(compiler)}/{LIBRARY_NAME}"

    def make(scratch: Path) -> Path:
        return _compile(compiler, scratch, children)

    return name, FileCache(cache_dir).obtain(name, make)


def load(library: Path, sha256: str | None = None) -> None:
    """Make the library's operators known as `specc_cpu::`; once a process.

    The file is read once; what is checked is a copy in memory, and so is what is opened.

    Args:
        library: the file.
        sha256: of its bytes, where that is known.
    Raises:
        EngineError: it cannot be loaded, was altered, is of another version of specc, or the
            process has loaded another build.
    """
    global _loaded
    data = read_checked(library, sha256)
    digest = hashlib.sha256(data).hexdigest()
    # before it is opened: opening it would run its code and take the operators' names
    _check_interface(library, data)
    if _loaded is not None:
        if _loaded[0] != digest:
            raise EngineError(
                f"{library} differs from the operators that this process has loaded",
                "engines with the same build of the CPU operators in one process",
                "compile the engines with one version of specc, or use a process for each",
            )
        return
    descriptor = -1
    try:
        # the descriptor stays open: the system takes two libraries of one path for one
        path, descriptor = sealed_copy(data, LIBRARY_NAME)
        # global: the compiled programs find the C functions by name
        loaded = (digest, ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise EngineError(
            f"{library} cannot be loaded: {error}",
            f"a library for torch {torch.__version__} on this machine",
            "compile the engine again on this machine",
        ) from error
    from specc.kernels.ops import of_cpu

    try:
        for operator in of_cpu():
            torch.library.register_fake(f"specc_cpu::{operator.name}", operator.fake)
    except RuntimeError as error:
        raise EngineError(
            f"{library} is of another version of specc: {str(error).strip().splitlines()[0]}",
            "the operators of this version",
            "compile the engine again with this version",
        ) from error
    _loaded = loaded


def interface_hash() -> str:
    """Hash of the installed sources that define the library's interface, without comments."""
    digest = hashlib.sha256()
    for name in _INTERFACE:
        code = _LINE_COMMENT.sub(b"", (SOURCE_DIR / name).read_bytes())
        digest.update(name.encode() + b"\0" + code + b"\0")
    return digest.hexdigest()[:16]


def _interface_of(data: bytes) -> str | None:
    """What version.cpp put into a library; None where there is nothing."""
    match = re.search(re.escape(_INTERFACE_MARK) + rb"(\w+)\0", data)
    return match[1].decode() if match else None


def _check_interface(library: Path, data: bytes) -> None:
    found = _interface_of(data) or "none"
    if found != (needed := interface_hash()):
        raise EngineError(
            f"{library} is of another version of specc (interface {found})",
            f"the operators of this version (interface {needed})",
            "compile the engine again with this version",
        )


def is_loaded() -> bool:
    return _loaded is not None


def c_functions() -> ctypes.CDLL:
    """The loaded library, for what calls its C functions."""
    assert _loaded is not None, "load() first"
    return _loaded[1]


def kernel_threads() -> int:
    """Threads that a kernel would use if this thread called one now."""
    assert _loaded is not None, "load() first"
    return _loaded[1].specc_kernel_threads()


def sum_floats(data: Tensor) -> float:
    """Sum of a contiguous float32 tensor with all threads of torch: reads as fast as can be."""
    assert _loaded is not None, "load() first"
    assert data.dtype == torch.float32
    assert data.is_contiguous()
    function = _loaded[1].specc_sum_floats
    function.restype = ctypes.c_float
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return function(data.data_ptr(), data.numel(), torch.get_num_threads())


def watch_memory(data: Tensor) -> None:
    """Let a process that a cut weight file kills say why; compiled programs do so themselves.

    Args:
        data: contiguous and in a mapped file; what frees its memory calls `forget_memory`.
    """
    assert _loaded is not None, "load() first"
    _loaded[1].specc_watch_memory(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes))


def forget_memory(data: Tensor) -> None:
    """End what `watch_memory` began."""
    assert _loaded is not None, "load() first"
    _loaded[1].specc_forget_memory(ctypes.c_void_p(data.data_ptr()))


def _sources() -> list[Path]:
    """What the compiler is called on, the one that takes longest first."""
    found = list(SOURCE_DIR.glob("*.cpp"))
    included = {name for path in found for name in _included(path)}
    alone = (path for path in found if path.name not in included)
    return sorted(alone, key=lambda path: (path.name != _CLASSES, path.name))


def _included(source: Path) -> list[str]:
    """The sources that a translation unit is made of, where it is made of several."""
    return _INCLUDED.findall(source.read_text(encoding="utf-8"))


def _flags_of(source: Path) -> tuple[str, ...]:
    if source.name == _CLASSES:
        return (*_FLAGS, *_CLASSES_FLAGS)
    names = set(_included(source) or [source.name])
    is_exact = names <= set(_EXACT_SOURCES)
    assert is_exact or not names & set(_EXACT_SOURCES), f"{source.name}: flags of two kinds"
    return (*_FLAGS, *_EXACT_FLAGS) if is_exact else _FLAGS


def _content_key(compiler: str) -> str:
    """Hash of all that the library is made of."""
    digest = hashlib.sha256()
    parts = [torch.__version__, platform.machine(), *isa_flags()]
    parts += [" ".join((source.name, *_flags_of(source))) for source in _sources()]
    parts += [str(compiler_version(compiler))]
    if Path(compiler).is_relative_to(default_cache_dir() / "compilers"):
        parts += [Path(compiler).read_text(encoding="utf-8")]  # its arguments
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name, path.read_text(encoding="utf-8")]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: str, scratch: Path, children: ChildProcesses) -> Path:
    root = Path(torch.__file__).parent
    include = ["-I", str(root / "include"), "-I", str(SOURCE_DIR)]
    include += ["-I", str(root / "include" / "torch" / "csrc" / "api" / "include")]
    defines = [f"-DSPECC_INTERFACE={interface_hash()}"]
    run = functools.partial(_run, scratch=scratch, children=children)

    def compile_one(source: Path) -> Path:
        made = scratch / f"{source.stem}.o"
        flags = [*_flags_of(source), *include, *defines]
        run([compiler, *flags, "-c", str(source), "-o", str(made)])
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _sources()))
    # of an inline function in several objects the linker takes the first: none of -O1
    objects.reverse()
    library = scratch / LIBRARY_NAME
    link = ["-L", str(root / "lib"), "-ltorch_cpu", "-lc10", *_openmp(root)]
    run([compiler, "-shared", *map(str, objects), *link, "-o", str(library)])
    return library


def _openmp(root: Path) -> list[str]:
    # torch's own copy: two OpenMP runtimes in a process spin against each other
    bundled = sorted((root / "lib").glob("libgomp*.so*")) + sorted((root / "lib").glob("libomp*"))
    return [str(bundled[0])] if bundled else ["-fopenmp"]


def _run(
    command: list[str], scratch: Path | None = None, children: ChildProcesses | None = None
) -> None:
    # what a compiler that is killed leaves goes with the rest of the directory
    environment = {"TMPDIR": str(scratch)} if scratch is not None else None
    result = (children or ChildProcesses()).run(command, environment)
    if result.returncode:
        if scratch is not None and is_full(scratch, result.stderr):
            raise FileCache().error(scratch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        raise CompilerError(
            f"{command[0]} failed: {(lines or result.stderr.splitlines() or ['no output'])[0]}",
            "a C++ compiler that builds specc's CPU operators",
            "set CXX to another compiler, or compile with --backend eager",
        )
