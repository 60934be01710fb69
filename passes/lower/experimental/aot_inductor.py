"""Compile the passes of steps with AOTInductor for a GPU: a package for each of their sizes.

Experimental: no GPU has shown it. Inductor generates the code, the Triton kernels of the operators
are part of it, and no Python runs between launches. Weights are bound when a package is loaded.
What has no package (prefill, batches that no graph is captured for) runs as the backend cuda does.

    python -m specc.passes.lower.experimental.aot_inductor program.json sizes.json package.pt2

runs in a process of its own, since Inductor's state is global.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest_entries import LimitsEntry
from specc.artifact.model_entry import ModelEntry
from specc.errors import CompilerError
from specc.passes.lower.cuda.pass_sizes import PassSizes, batch_sizes, step_sizes
from specc.passes.lower.experimental.inline_kernels import (
    CacheSizes,
    example_inputs,
    export_inlined,
)
from specc.passes.program import Program
from specc.passes.program_json import program_to_json
from specc.speculation.plans import SpecPlan
from specc.system.child_processes import ChildProcesses, end_with_parent
from specc.system.extras import install_command
from specc.system.file_cache import FileCache

BACKEND = "aot-inductor"
# set to this, it lets the compiler do what no GPU has shown
EXPERIMENTAL = "SPECC_EXPERIMENTAL"
INDEX_FILE = "packages.json"
_ERROR_LINES = 12
# what compiles one package: content of program.json, sizes, sizes of the caches, file to write
Compile = Callable[[Mapping[str, Any], PassSizes, CacheSizes, Path], None]


def check_machine() -> None:
    """Whether packages can be compiled here.

    Raises:
        CompilerError: nobody asked for what is experimental, no GPU, or no Triton.
    """
    if BACKEND not in os.environ.get(EXPERIMENTAL, "").split(","):
        raise CompilerError(
            f"backend {BACKEND}, which no GPU has shown yet",
            f"{EXPERIMENTAL}={BACKEND} in the environment, to try it all the same",
            f"set it, or compile with --backend cuda, which {BACKEND} adds compiled code to",
        )
    if not torch.cuda.is_available():
        raise CompilerError(
            f"backend {BACKEND} and no GPU that torch can use",
            "the kind of GPU that will run the engine: its code is generated and loaded there",
            "compile on a machine that has one, or with --backend cuda, which needs none",
        )
    if importlib.util.find_spec("triton") is None:
        raise CompilerError(
            f"backend {BACKEND} and no Triton",
            "triton, which compiles the kernels",
            install_command("cuda"),
        )


def lower_aot_inductor(
    models: Sequence[tuple[ModelEntry, Program]],
    plans: Sequence[SpecPlan],
    limits: LimitsEntry,
    writer: EngineWriter,
    compile_one: Compile | None = None,
) -> int:
    """Compile every pass that steps of the engine make, and write which package serves which.

    The index of a model is `packages.json` in its directory: `packages`, a list of a `file` (in
    the engine) and the shapes of its `inputs`, null for absent ancestors; `caches`, the shape of
    each; and `capability` [major, minor] of the GPU that the code is for.

    Args:
        models: with their programs after the phases of the backend cuda, the target first.
        plans: of the engine.
        limits: of the engine.
        writer: of the engine.
        compile_one: what compiles a package; None is AOTInductor, in a process.
    Returns:
        number of packages.
    Raises:
        CompilerError: AOTInductor fails, or a draft reads the target's hidden states.
        OutputError: a file of the engine cannot be written.
    """
    for entry, model in models:
        if model.row_inputs:
            raise CompilerError(
                f"backend {BACKEND}, and a draft that reads hidden states ({entry.name})",
                "drafts that read tokens alone: no package names rows that tokens read",
                "compile with --backend cuda",
            )
    compile_one = compile_one or compile_package
    caches = _cache_sizes(limits, models[0][0])
    vocab_sizes = {entry.name: entry.vocab_size for entry, _ in models}
    batches = batch_sizes(limits.max_batch_size)
    found = step_sizes(plans, vocab_sizes, batches, caches.blocks_per_sequence)
    for entry, model in models:
        program = program_to_json(model)
        packages = []
        for sizes in found[entry.name]:
            name = f"t{sizes.tokens}-r{sizes.rows}-b{sizes.batch}-w{sizes.words}"
            file = f"{entry.dir}/packages/{name}.pt2"
            compile_one(program, sizes, caches, writer.path(file))
            shapes = [None if x is None else list(x.shape) for x in example_inputs(sizes, caches)]
            packages.append({"file": file, "inputs": shapes})
        index = {
            "schema_version": 1,
            "capability": list(torch.cuda.get_device_capability()),
            "packages": packages,
            "caches": _cache_shapes(program, caches),
        }
        writer.write_json(f"{entry.dir}/{INDEX_FILE}", index)
    return sum(map(len, found.values()))


def compile_package(
    program: Mapping[str, Any], sizes: PassSizes, caches: CacheSizes, package: Path
) -> None:
    """Compile one package in another process.

    Raises:
        CompilerError: AOTInductor fails.
    """
    with FileCache().scratch() as scratch:
        source, request = scratch / "program.json", scratch / "sizes.json"
        source.write_text(json.dumps(program), encoding="utf-8")
        request.write_text(json.dumps([asdict(sizes), asdict(caches)]), encoding="utf-8")
        # -P: the working directory may hold folders called kernels or passes
        command = [sys.executable, "-P", "-m", __name__, str(source), str(request), str(package)]
        # not where others may have put what would be compiled or run; see `inductor.package`
        places = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
        result = ChildProcesses().run(command, places)
    if result.returncode or not package.is_file():
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()[-_ERROR_LINES:]
        raise CompilerError(
            f"compiling {program['name']} for {sizes.tokens} tokens of {sizes.batch} sequences"
            " failed: " + "\n        ".join(lines or ["no output"]),
            "a torch, a Triton and a C++ compiler that compile this program for this GPU",
            "report this with the lines above, or compile with --backend cuda",
        )


def lower(
    program: Mapping[str, Any],
    sizes: PassSizes,
    caches: CacheSizes,
    package: Path,
    device: torch.device,
) -> None:
    """Export the program as launches and compile it in this process, for this device."""
    import torch._inductor

    exported = export_inlined(program, sizes, caches, device)
    torch._inductor.aoti_compile_and_package(
        exported, package_path=str(package), inductor_configs=inductor_options()
    )


def inductor_options() -> dict[str, Any]:
    """Options of Inductor: weights stay outside of the package, as for the CPU."""
    return {
        "aot_inductor.package_constants_in_so": False,
        # Inductor copies the values of small constants into the code; there are none here yet
        "always_keep_tensor_constants": True,
    }


def _cache_sizes(limits: LimitsEntry, target: ModelEntry) -> CacheSizes:
    """Sizes of the caches that the runtime makes (runtime/scheduling/kv_cache.py)."""
    longest = min(limits.max_seq_len, target.max_position) + limits.max_nodes
    block_size = limits.block_size or longest
    per_sequence = -(-longest // block_size)
    return CacheSizes(limits.max_batch_size * per_sequence, block_size, per_sequence)


def _cache_shapes(program: Mapping[str, Any], caches: CacheSizes) -> list[list[int]]:
    return [
        [caches.num_blocks, caches.block_size, *entry["shape"]]
        for entry in program["inputs"]
        if entry["kind"] == "cache"
    ]


def _main(source: str, request: str, package: str) -> None:
    program = json.loads(Path(source).read_text(encoding="utf-8"))
    sizes, caches = json.loads(Path(request).read_text(encoding="utf-8"))
    device = torch.device("cuda", torch.cuda.current_device())
    lower(program, PassSizes(**sizes), CacheSizes(**caches), Path(package), device)


if __name__ == "__main__":
    end_with_parent()
    _main(*sys.argv[1:])
