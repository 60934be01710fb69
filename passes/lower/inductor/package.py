"""Compile a lowered program with AOTInductor: one package for every number of tokens.

Weights are bound when the package is loaded, so none is needed here. Attention and projections are
calls of C functions (kernels/cpu); Inductor generates what lies between them.

Each program is compiled in a process of its own (`worker.py`): Inductor's state is global, and two
models compile side by side.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.graph_io import graph_from_json
from specc.errors import CompilerError
from specc.kernels import native, operators, ops
from specc.passes.lower.inductor.warm import warm_inductor
from specc.passes.program import FEATURE_ROWS, HIDDEN, MASS
from specc.system.child_processes import ChildProcesses
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.file_cache import FileCache
from specc.system.files import is_full
from specc.system.machine import isa_flags
from specc.system.owned_directory import temporary_directory

# sizes of the example inputs: distinct, so that no two dimensions are taken for one; none of them
# is 0 or 1, which torch would specialize
_TOKENS, _BATCH, _WORDS, _TABLE, _ROWS, _BLOCKS, _BLOCK_SIZE = 24, 3, 2, 5, 7, 11, 13
# of the mass of blocks: sequences that there may be, and columns of their block tables
_SEQUENCES, _COLUMNS = 17, 19
# inputs whose first dimension is the number of tokens
_TOKEN_INPUTS = (0, 1, 3, 5)
_ERROR_LINES = 12
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Inductor takes options from the environment, too
_SETTINGS = ("AOT_INDUCTOR_", "AOTINDUCTOR_", "TORCHINDUCTOR_")
_IMPORTED_WITH = {
    # a quarter of the time, in an empty directory: a pool of processes that gets no work, and
    # trial compilations for each instruction set, all of which `find_compiler`'s oldest knows
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    # a tenth of what g++ takes, for lines that nobody has the source of
    "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",
}


def compile_package(program: Mapping[str, Any], children: ChildProcesses | None = None) -> bytes:
    """Compile in another process; the user's cache answers where the same was compiled before.

    Args:
        program: content of a `program.json` whose projections are `specc.linear`.
        children: that the process is one of.
    Returns:
        content of the `.pt2`.
    Raises:
        CompilerError: Inductor or the C++ compiler fails, or the cache cannot be written.
    """
    compiler = find_compiler()

    def make(scratch: Path) -> Path:
        return _compile(program, compiler, scratch, children or ChildProcesses())

    return FileCache().obtain(f"programs/{_content_key(program, compiler)}.pt2", make)


def _compile(
    program: Mapping[str, Any], compiler: str, scratch: Path, children: ChildProcesses
) -> Path:
    source, made = scratch / "program.json", scratch / "program.pt2"
    source.write_text(json.dumps(program), encoding="utf-8")
    # Inductor keeps its files under names that others may know, in the temporary directory; two
    # processes that compile the same program meet there, and what a killed one left is used again
    temporary, inductor = scratch / "temporary", scratch / "inductor"
    for directory in (temporary, inductor):
        directory.mkdir()
    places = {"TMPDIR": str(temporary), _VARIABLE: str(inductor)}
    settings = {**_IMPORTED_WITH, "CXX": compiler}
    with warm_inductor(settings) as process:
        result = process.run([str(source), str(made)], {**settings, **places}, children)
    if result.returncode or not made.is_file():
        if is_full(scratch, result.stdout):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise FileCache().error(scratch, full)
        lines = result.stdout.strip().splitlines()[-_ERROR_LINES:]
        raise CompilerError(
            f"compiling {program['name']} failed: " + "\n        ".join(lines or ["no output"]),
            "a C++ compiler and a torch that compile this program",
            "report this with the lines above, or compile with --backend eager",
        )
    return made


def lower(program: Mapping[str, Any], package: Path, num_tokens: int | None = None) -> None:
    """Export the program with dynamic sizes and compile it in this process.

    Args:
        program: content of a `program.json` whose projections are `specc.linear`.
        package: .pt2 file to write.
        num_tokens: the only number of tokens that the code serves; None serves all of them.
            Engines have the latter; examples/measure_specialised.py measures what it costs.
    """
    import torch._inductor
    from torch.fx.experimental import _config as symbolic_shapes

    module = BoundProgram(program)
    # oblivious: a size that happens to be 1 at run time takes the same code as any other
    with symbolic_shapes.patch(backed_size_oblivious=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs, dynamic = _example_inputs(module, num_tokens)
        exported = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=inductor_options(exported.graph)
        )


def inductor_options(graph: torch.fx.Graph) -> dict[str, Any]:
    """Options for a graph. Its code declares the C functions that it calls, and no others, so that
    it does not change with operators that come for other programs.
    """
    called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    shims = {
        getattr(ops, name): [text]
        for name, text in native.C_SHIMS.items()
        if f"specc.{name}.default" in called
    }
    return {
        # weights come from the engine's own file
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": shims,
        # Inductor copies the values of small constants into the code; there are none here yet
        "always_keep_tensor_constants": True,
        # it would compute with the values of constants of one element, too
        "joint_graph_constant_folding": False,
        # each program compiles in a directory of its own, where they would serve once
        "aot_inductor.precompile_headers": False,
        # dimensions of 1 are below the bounds that torch derives from the example inputs
        "aot_inductor.check_lowerbound": False,
        # the number of threads is the user's choice at run time
        "cpp.dynamic_threads": True,
    }


class BoundProgram(nn.Module):
    """The graph with weights as parameters `w0`, `w1`, … in the order of its inputs."""

    def __init__(self, program: Mapping[str, Any]) -> None:
        super().__init__()
        self.graph = graph_from_json(program["graph"])
        self.num_weights = 0
        for entry in program["inputs"]:
            if entry["kind"] in ("weight", "constant"):
                dtype = getattr(torch, entry["dtype"])
                # never written or read, so the system gives it no memory; no buffer, since
                # Inductor clones those, and the clones are written
                value = nn.Parameter(torch.empty(entry["shape"], dtype=dtype), requires_grad=False)
                self.register_parameter(f"w{self.num_weights}", value)
                self.num_weights += 1
        self.takes_mass = any(entry.get("name") == MASS for entry in program["inputs"])
        # of a segment of a model, or a head: sizes of the value that it takes, None for that of
        # the tokens
        self.hidden = [
            (entry["shape"], getattr(torch, entry["dtype"]))
            for entry in program["inputs"]
            if entry["kind"] == "input" and entry["name"] in (HIDDEN, FEATURE_ROWS)
        ]
        self.kinds = [entry["kind"] for entry in program["inputs"]]
        self.cache_shapes = [
            (entry["shape"], getattr(torch, entry["dtype"]))
            for entry in program["inputs"]
            if entry["kind"] == "cache"
        ]

    def forward(self, inputs: list[Tensor], caches: list[Tensor]) -> Tensor:
        weights = iter(getattr(self, f"w{i}") for i in range(self.num_weights))
        given, kept = iter(inputs), iter(caches)
        sources = {"weight": weights, "constant": weights, "input": given, "cache": kept}
        return self.graph(*(next(sources[kind]) for kind in self.kinds))


def _example_inputs(
    module: BoundProgram, num_tokens: int | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Inputs in the order of RUNTIME_INPUTS and the caches, with their dynamic dimensions."""
    dynamic = torch.export.Dim.DYNAMIC
    i32, i64 = torch.int32, torch.int64
    tokens = num_tokens or _TOKENS
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((tokens,), i64),
        ((tokens,), i64),
        ((_BATCH + 1,), i32),
        ((tokens,), i32),
        ((_BATCH,), i32),
        ((tokens, _WORDS), i64),
        ((_BATCH, _TABLE), i32),
        ((_ROWS,), i64),
    ]
    if module.takes_mass:
        shapes.append(((_SEQUENCES, _COLUMNS), torch.float32))
    for sizes, dtype in module.hidden:
        shapes.append((tuple(size or tokens for size in sizes), dtype))
    inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
    caches = [
        torch.zeros(_BLOCKS, _BLOCK_SIZE, *shape, dtype=dtype)
        for shape, dtype in module.cache_shapes
    ]
    input_dims = [dict.fromkeys(range(len(shape)), dynamic) for shape, _ in shapes]
    for sizes, _ in module.hidden:
        input_dims[-1] = {dim: dynamic for dim, size in enumerate(sizes) if size is None}
    if num_tokens is not None:
        for i in _TOKEN_INPUTS:
            input_dims[i][0] = torch.export.Dim.STATIC
    cache_dims = [{0: dynamic, 1: dynamic} for _ in caches]
    return (inputs, caches), (input_dims, cache_dims)


def _content_key(program: Mapping[str, Any], compiler: str) -> str:
    """Hash of all that the package is made of: models of the same shape share it."""
    digest = hashlib.sha256()
    parts = [torch.__version__, str(compiler_version(compiler)), *isa_flags()]
    parts += [json.dumps(_compiled_part(program), sort_keys=True)]
    parts += [Path(__file__).read_text(encoding="utf-8")]
    # Inductor takes the layouts of results from the fakes, and the C functions make them
    made = ("quantized_operators.cpp", "ranks_operators.cpp", "register.cpp", "tensors.h")
    sources = [Path(ops.__file__), *sorted(Path(operators.__path__[0]).glob("*.py"))]
    sources += [native.SOURCE_DIR / name for name in made]
    if Path(compiler).is_relative_to(FileCache().root):
        sources.append(Path(compiler))  # a script that holds the arguments of CXX
    parts += [path.read_text(encoding="utf-8") for path in sources]
    parts += [str(sorted(native.C_SHIMS.items()))]
    parts += [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and name != _VARIABLE
    ]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compiled_part(program: Mapping[str, Any]) -> dict[str, Any]:
    """What `BoundProgram` reads, without names: inputs and weights have their places, and nodes
    are called as passes and traces of this process happened to count them.
    """
    inputs = [
        {key: entry[key] for key in ("kind", "dtype", "shape") if key in entry}
        for entry in program["inputs"]
    ]
    places = {node["name"]: place for place, node in enumerate(program["graph"]["nodes"])}
    nodes = [
        [
            node["op"],
            node.get("target"),
            _by_place(node.get("args", []), places),
            {key: _by_place(arg, places) for key, arg in node.get("kwargs", {}).items()},
        ]
        for node in program["graph"]["nodes"]
    ]
    return {
        "inputs": inputs,
        "nodes": nodes,
        "output": _by_place(program["graph"]["output"], places),
    }


def _by_place(arg: Any, places: Mapping[str, int]) -> Any:
    """An argument as `graph_to_json` writes it, with the places of nodes for their names."""
    if isinstance(arg, list):
        return [_by_place(item, places) for item in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, value),) = arg.items()
    if kind == "node":
        return {kind: places[value]}
    if kind == "dict":
        return {kind: {key: _by_place(item, places) for key, item in value.items()}}
    return {kind: _by_place(value, places)}


@contextlib.contextmanager
def inductor_directory() -> Iterator[None]:
    """Let what torch does inside of the block use an empty directory of its own.

    To open and to trace a model torch imports parts of Inductor, which look for settings in a
    directory of the temporary one whose name everybody knows, and make it where it is absent. A
    directory that the user has named is left alone.

    Raises:
        CompilerError: the temporary directory cannot be written.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(temporary_directory())
        except OSError as error:
            raise CompilerError(
                f"writing the temporary directory failed: {error}",
                "a directory with some room that this user may write to",
                "free some space, or set TMPDIR to another directory",
            ) from error
        os.environ[_VARIABLE] = str(directory)
        # torch sets it, too
        stack.callback(os.environ.pop, _VARIABLE, None)
        yield
