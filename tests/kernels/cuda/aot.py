"""Compile the shipped configurations of all Triton kernels without a GPU, and say what they use.

    python -P tests/kernels/cuda/aot.py --capabilities 90 --output usage.jsonl [--only attend]
    python -P tests/kernels/cuda/aot.py --capabilities 90 --output usage.jsonl --tables budget

A process of its own, without TRITON_INTERPRET. Triton compiles a kernel that asks for more shared
memory than a device has, and one that spills: only the numbers tell. The output has one line a
configuration, written as soon as it is known; what stands there is not compiled again unless its
source has changed, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

# files of specc/kernels/cuda with a function `shipped`, the quick ones first
MODULES = (
    "rows", "leave_step", "commit_kv", "write_kv", "slab_rows", "block_mass",
    "tree_conv", "tree_recurrence", "act_and_mul", "rms_norm", "hadamard", "rope_write",
    "rope_write_latent",
    "accept_winners", "tree_expand", "merge", "trees", "lookup",
    "attend_few", "attend_wide", "attend", "attend_latent", "attend_latent_few",
    "invariant_attend",
    "add_norm_linear", "add_norm_gate_up", "add_norm_rope_write",
    "add_norm_head", "embed_norm_rope_write", "route", "experts", "linear_q",
    "experts_fragments", "linear_q_fragments", "add_norm_fragments", "add_norm_rope_fragments",
    "skinny_linear", "invariant_linear",
    "tree_context", "row_filters", "node_best", "node_winners", "accept_walk", "child_keys",
)  # fmt: skip
CAPABILITIES = (80, 90, 100, 120)
ATTENTION = ("attend", "attend_few", "attend_wide", "attend_latent", "attend_latent_few")
# what calls of attention may have, and configurations ship without
BESIDE = ("sinks", "softcap")
# files with kernels over caches that may be quantized, and the types of these
OVER_QUANTIZED = ("write_kv", "rope_write", "block_mass", "attend", "attend_few")
CODES = {"int8": "*i8", "fp8": "*u8"}
# arguments whose memory no step writes
CONSTANTS = ("weight",)
# what kernels that fill the device read in their loops
STREAMED = ("weight", "k_cache", "v_cache")
_PTXAS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\s.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
# what is checked of the PTX, and what is counted: kept lines hold for these files alone
_CHECKS = hashlib.sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("aot.py", "ptx_order.py"))
).hexdigest()[:16]
_TENSOR_CORES = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")


@dataclass(frozen=True)
class Usage:
    """What a compiled configuration uses.

    Args:
        registers: of a thread.
        spilled: bytes that ptxas stores to and loads from local memory for want of registers.
        stack: bytes of a thread's stack frame: spilled registers and arrays that no register holds.
        shared: bytes of a block's shared memory.
        tensor_memory: columns of a block's tensor memory (sm_100).
        tensor_core: matrix instructions for tensor cores in the code.
    """

    registers: int
    spilled: int
    stack: int
    shared: int
    tensor_memory: int
    tensor_core: int


def items(
    module: str, capability: int, chunk: int = 0, beside: Collection[str] = (), rows: str = ""
) -> list[Any]:
    """What a file ships for a capability.

    Args:
        chunk: what it has for chunks of so many positions; 0 is none.
        beside: those of `BESIDE` that calls have.
        rows: what caches hold, of `CODES`; else the type of the queries.
    """
    file = importlib.import_module(f"specc.kernels.cuda.{module}")
    given: dict[str, Any] = {"chunk": chunk} if chunk else {}
    if rows and "is_quantized" in inspect.signature(file.shipped).parameters:
        given["is_quantized"] = True
    found = file.shipped(capability, **given)
    return [with_rows(with_beside(item, beside), rows) for item in found]


def with_beside(item: Any, names: Collection[str]) -> Any:
    """A configuration of attention for calls that have what it ships without."""
    if not names or not set(names) <= item.constexprs.keys():
        return item
    types = {"sinks": item.signature["q"], "softcap": "fp32"}
    return replace(
        item,
        signature={**item.signature, **{name: types[name] for name in names}},
        constexprs={name: x for name, x in item.constexprs.items() if name not in names},
        divisible=(*item.divisible, *(name for name in names if name == "sinks")),
    )


def with_rows(item: Any, kind: str) -> Any:
    """A configuration over quantized caches: rows have four bytes more, so few strides align."""
    caches = {name: CODES[kind] for name in item.signature if kind and name.endswith("_cache")}
    if not caches:
        return item
    aligned = [name for name in item.divisible if not re.match("stride_[kv]c?[bsh]$", name)]
    signature = {**item.signature, **caches}
    return replace(item, name=f"{item.name}-{kind}", signature=signature, divisible=aligned)


def usage(item: Any, capability: int) -> Usage:
    """Compile one configuration; needs a process without `TRITON_INTERPRET`."""
    import triton
    from triton.backends.compiler import GPUTarget

    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            item.source(), target=GPUTarget("cuda", capability, 32), options=item.options
        )
    # one kernel, and no function that it calls: a second one would have a line of its own
    (found,) = _PTXAS.finditer(log.getvalue())
    if compiled.metadata.global_scratch_size:
        raise ValueError(f"{item.name}: needs memory that no launch gives it")
    check_order(item, compiled.asm["ptx"])
    return Usage(
        registers=int(found["registers"]),
        spilled=int(found["stores"]) + int(found["loads"]),
        stack=int(found["stack"]),
        shared=compiled.metadata.shared,
        tensor_memory=compiled.metadata.tmem_size,
        tensor_core=len(_TENSOR_CORES.findall(compiled.asm["ptx"])),
    )


def check_order(item: Any, ptx: str) -> None:
    """A kernel that is launched early waits before it touches memory; others know nothing of it.

    Raises:
        ValueError: what is wrong.
    """
    ptx_order = _beside("ptx_order")
    if not item.is_dependent:
        wrong = [] if ptx_order.is_ordinary(ptx) else ["instructions of dependent launches"]
    else:
        arguments = [name for name in item.kernel.arg_names if name in item.signature]
        wrong = ptx_order.problems(ptx, arguments, CONSTANTS, item.early)
        wrong += ptx_order.starts_soon(ptx, arguments, STREAMED)
    if wrong:
        raise ValueError(f"{item.name}: {'; '.join(wrong[:5])}")


def _beside(name: str) -> Any:
    """A module of this folder: a script of its own finds no `tests`."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read_lines(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """(version of Triton, capability, name) → what was found last."""
    found = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # cut off where a run was ended
                line = json.loads(text)
                found[line["triton"], line["capability"], line["name"]] = line
    return found


def usage_of(line: Mapping[str, Any]) -> Usage:
    return Usage(**{field.name: line[field.name] for field in fields(Usage)})


def compile_all(
    work: Iterable[tuple[int, str, Any]], output: Path, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a line for each (capability, name, configuration), as far as the time allows."""
    import triton

    known = read_lines(output)
    begin = time.monotonic()
    with output.open("a", encoding="utf-8") as file:
        for capability, name, item in work:
            key = f"{item.source().hash()}-{json.dumps(item.options, sort_keys=True)}"
            key += f"-{sorted(item.early)}-{item.is_dependent}-{_CHECKS}"
            line = known.get((triton.__version__, capability, name))
            # what failed may have failed for want of memory or room
            if line is None or "error" in line or line["key"] != key:
                if time.monotonic() - begin > seconds:
                    return
                line = {"triton": triton.__version__, "capability": capability, "name": name}
                started = time.perf_counter()
                try:
                    line |= asdict(usage(item, capability))
                except Exception as error:
                    line["error"] = f"{type(error).__name__}: {error}"[:2000]
                line |= {"seconds": round(time.perf_counter() - started, 2), "key": key}
                file.write(json.dumps(line) + "\n")
                file.flush()
            yield line


def table_path(folder: Path, version: str, capability: int) -> Path:
    return folder / f"triton-{version}-sm_{capability}.json"


def digests(shipped: Mapping[str, Any]) -> dict[str, str]:
    """File with kernels → digest of its configurations, which say what is compiled of a source.

    Args:
        shipped: "rows/tree_rows" → `Shipped`.
    """
    found: dict[str, list[str]] = {}
    for name, item in sorted(shipped.items()):
        said = [name, item.kernel.__name__, dict(item.signature), dict(item.constexprs)]
        said += [item.options, sorted(item.divisible), sorted(item.early)]
        found.setdefault(name.split("/")[0], []).append(json.dumps(said, default=str))
    return {
        file: hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
        for file, said in found.items()
    }


def write_table(
    path: Path,
    version: str,
    capability: int,
    shipped: Mapping[str, Any],
    found: Mapping[str, Usage],
) -> None:
    """Write a budget table: one line a configuration, sorted."""
    head = {
        "triton": version,
        "capability": capability,
        "configurations": digests(shipped),
        "columns": [field.name for field in fields(Usage)],
    }
    rows = [f"  {json.dumps(name)}: {list(astuple(found[name]))}" for name in sorted(found)]
    text = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    text = f'{{\n{text},\n "budgets": {{\n' + ",\n".join(rows) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--only", nargs="+", default=MODULES, choices=MODULES)
    parser.add_argument("--names", nargs="+", help="these alone: sm_90/rows/tree_rows")
    parser.add_argument("--chunk", type=int, default=0, help="positions; of `--only attend`")
    parser.add_argument("--beside", nargs="+", default=(), choices=BESIDE, help="of attention")
    parser.add_argument("--rows", default="", choices=CODES, help="what caches hold")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tables", type=Path, help="folder of budget tables to write")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing later")
    options = parser.parse_args()
    if options.chunk and (options.only != ["attend"] or options.tables):
        parser.error("--chunk goes with --only attend, and without --tables")
    if options.beside and (not set(options.only) <= set(ATTENTION) or options.tables):
        parser.error(f"--beside goes with --only {' '.join(ATTENTION)}, and without --tables")
    if options.rows and (
        options.chunk or not set(options.only) <= set(OVER_QUANTIZED) or options.tables
    ):
        parser.error(f"--rows goes with --only {' '.join(OVER_QUANTIZED)}, and without --tables")
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    from triton import __version__, knobs

    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    work = [
        (capability, f"{module}/{item.name}", item)
        for capability in options.capabilities
        for module in options.only
        for item in items(module, capability, options.chunk, options.beside, options.rows)
        if options.names is None or f"sm_{capability}/{module}/{item.name}" in options.names
    ]
    lines = []
    with tempfile.TemporaryDirectory(prefix="specc-aot-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for line in compile_all(work, options.output, options.seconds):
            lines.append(line)
    print(f"{len(lines)} of {len(work)} configurations", file=sys.stderr)
    failed = [x for x in lines if "error" in x]
    for line in failed:
        print(f"sm_{line['capability']} {line['name']}: {line['error']}", file=sys.stderr)
    if failed or len(lines) < len(work):
        return 1
    for capability in options.capabilities if options.tables else ():
        found = {x["name"]: usage_of(x) for x in lines if x["capability"] == capability}
        shipped = {name: item for c, name, item in work if c == capability}
        path = table_path(options.tables, __version__, capability)
        write_table(path, __version__, capability, shipped, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
