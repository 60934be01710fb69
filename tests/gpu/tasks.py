"""What the commands of the GPU check run, and how long each piece may take.

    A  the step benchmark, replays, output, engines of other kinds
    B  every test of the Triton kernels
    C  attention, sampling, collectives, compute-sanitizer, then what compares with others
    D  products by quantized weights, then steps of 8B with them
    E  steps of a mixture and of latent attention, kernels that have not run yet, compute-sanitizer
    R  an engine of TensorRT-RTX that was built without a GPU
    S  steps of all published shapes
    T  tiles of products in bfloat16, for the tables

A command is stages, one after the other; the tasks of a stage run beside each other. A stage ends
at the latest when it and those before it have had their seconds: what it leaves, the next ones
have more. So a command ends in time whatever its tasks do.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gpu.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
# seconds of a command: 8 of the 10 minutes that a command may have
LIMIT_S = 480.0
# of those, to look at the machine, and to end processes and write the rest
OVERHEAD_S = 30.0
# of 16 cores
WORKERS = 12
# a test or a measurement takes longer: it hangs
RESULT_S = 150.0
# of command A: all that a step compiles comes between two results
STEP_RESULT_S = 120.0
# of a process that shows whether compute-sanitizer works: without a sign of life it does not
PROBE_S = 60.0
# files whose tests compile more than a process gets done in time, and in how many parts they run
SHARDS = {"test_attend": 4, "test_accept": 3, "test_add_norm": 3, "test_attend_latent": 3}
# of kernel tests; the others are about the interpreter, the compiler and TensorRT's plugins
NOT_ON_A_GPU = ("test_interpreter", "test_budgets", "test_compiled_scores")
SANITIZED = (
    "commit_kv", "write_kv", "attend", "rope_write", "add_norm", "skinny_linear", "accept",
    "node_winners",
)  # fmt: skip
# of command E: what no GPU has run, or not since it changed
NEW_KERNELS = (
    "attend", "attend_few", "attend_latent", "attend_latent_few", "attend_wide", "route",
    "experts", "experts_fragments", "linear_q", "linear_q_fragments", "add_norm_fragments",
    "add_norm_rope_fragments", "write_kv", "hadamard", "rope_write", "rope_write_latent",
    "invariant_attend", "invariant_linear",
)  # fmt: skip
NEW_SANITIZED = (
    "attend_few", "attend_latent", "attend_latent_few", "route", "experts", "experts_fragments",
    "linear_q", "linear_q_fragments", "add_norm_fragments", "add_norm_rope_fragments",
    "hadamard", "invariant_attend", "invariant_linear",
)  # fmt: skip
# steps of commands D and E
DENSE = (
    "8b-1b", "8b-1b int4", "8b-1b int4 fragments", "8b-1b int4 draft", "8b-1b int8 fragments",
    "8b-1b fp8 fragments", "8b-1b int8", "8b-1b fp8",
)  # fmt: skip
SPARSE = ("30b-a3b mixture", "16b latent attention")
# processes that trace beside the one that has the GPU
TRACING = 6
# what memcheck says of the probe
PLANTED_FAULT = "Invalid __global__ write"
# sizes of real models take the sanitizer minutes, and hold no other code
TOO_LARGE = "GPU_CASES"
# tests that have the code of others once more, with other data
TOO_MANY = ("test_add_norm_rope_write_with_every_tile",)


@dataclass(frozen=True)
class Task:
    """One process.

    Args:
        entry: module:function, called with results, device and `arguments`.
        least_s: with less time left it does not start.
        result_s: without a result for so long it hangs.
        is_resumed: a process that crashed, hung or lost its device is followed by another one,
            which does what is left.
        environment: variables besides those of the check.
        sanitizer: run under compute-sanitizer.
        needs: name of a task of the same part that has to pass first; where it does not, this one
            is `not available`, too.
        says: what the process has to print; one that does not, or fails, is `not available`: it
            asks what the machine can do.
    """

    part: str
    name: str
    entry: str
    arguments: dict[str, Any] = field(default_factory=dict)
    least_s: float = 20.0
    result_s: float = RESULT_S
    is_resumed: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    sanitizer: str | None = None
    needs: str | None = None
    says: str | None = None


@dataclass(frozen=True)
class Stage:
    """Tasks that run beside each other, `workers` at a time, for `seconds` at most."""

    seconds: float
    tasks: tuple[Task, ...]
    workers: int = WORKERS


def chosen(stage: Stage, parts: Sequence[str] | None, names: Sequence[str] | None = None) -> Stage:
    """A stage with the tasks of these parts and names alone; None are all of them."""
    tasks = (
        task
        for task in stage.tasks
        if (parts is None or task.part in parts) and (names is None or task.name in names)
    )
    return replace(stage, tasks=tuple(tasks))


def kernel_files() -> list[Path]:
    files = sorted((ROOT / "tests/kernels/cuda").glob("test_*.py"))
    return [path for path in files if path.stem not in NOT_ON_A_GPU]


def kernel_tasks(files: Sequence[Path]) -> tuple[Task, ...]:
    """A task for each file, or for each part of a long one; the long ones first."""
    tasks = []
    for path in sorted(files, key=lambda path: -SHARDS.get(path.stem, 1)):
        count = SHARDS.get(path.stem, 1)
        for index in range(count):
            name = path.stem if count == 1 else f"{path.stem} {index + 1} of {count}"
            arguments = {"path": str(path), "shard": [index, count]}
            entry = "tests.gpu.kernel_tests:run"
            tasks.append(Task("kernels", name, entry, arguments, 10.0, is_resumed=True))
    return tuple(tasks)


def sanitizer_tasks(tool: str | None, names: Sequence[str] = SANITIZED) -> tuple[Task, ...]:
    """Kernel tests under memcheck: every allocation of torch's is one of CUDA's then.

    Before them a probe: some machines refuse the tool, or let it see nothing.
    """
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    probe = Task("sanitizer", "probe", "tests.gpu.sanitizer:skip")
    if tool is not None:
        entry = "tests.gpu.sanitizer:probe"
        probe = Task("sanitizer", "probe", entry, {}, 20.0, PROBE_S, False, environment, tool)
        probe = replace(probe, says=PLANTED_FAULT)
    left_out = [*large_cases(), *TOO_MANY]
    tests = (
        Task(
            "sanitizer", name, "tests.gpu.kernel_tests:run",
            {"path": str(ROOT / f"tests/kernels/cuda/test_{name}.py"), "left_out": left_out},
            is_resumed=True,
            environment=environment,
            sanitizer=tool,
            needs=probe.name,
        )
        for name in names
    )  # fmt: skip
    return (probe, *tests)


def large_cases() -> list[str]:
    """Names of the cases of `attend` that only a GPU computes in time; nothing is imported."""
    tree = ast.parse((ROOT / "tests/kernels/cuda/cases_attend.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == TOO_LARGE:
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise LookupError(f"no {TOO_LARGE} in cases_attend.py")


def command_a() -> list[Stage]:
    """Each is resumed: what ends a process while it measures products is left out by the next."""

    def task(part: str, name: str, entry: str, arguments: dict[str, Any], least_s: float) -> Task:
        made = Task(part, name, f"tests.gpu.{entry}", arguments, least_s, STEP_RESULT_S)
        return replace(made, is_resumed=True)

    measured = task("steps", "8b-1b", "benchmark:measure_steps", {}, 60.0)
    replays = [
        task("replay", "float32", "replay:check_pair", {}, 40.0),
        task("replay", "overlap", "replay:check_overlap", {}, 40.0),
        task("replay", "bf16-8b", "replay:check_8b", {}, 60.0),
        task("replay", "nccl", "collectives:check_step", {}, 60.0),
        task("replay", "grammar-float32", "grammar:check", {"dtype": "float32"}, 40.0),
        task("replay", "cut-trees", "cut_trees:check_policies", {}, 40.0),
        task("replay", "unsure-drafts", "cut_trees:check_drafters", {}, 40.0),
        task("replay", "grammar-bfloat16", "grammar:check", {"dtype": "bfloat16"}, 40.0),
    ]
    output = [
        task("output", dtype, "output:check", {"dtype": dtype}, 40.0)
        for dtype in ("float32", "bfloat16")
    ]
    kinds = [task("kinds", kind, "kinds:check", {"kind": kind}, 40.0) for kind in KINDS]
    # alone on the machine while it measures; the others apart, since all of them compile: six took
    # 62 s on an H200 with 16 cores, and of twelve none had a result after 95
    return [
        Stage(190.0, (measured,), 1),
        Stage(120.0, (*replays, *output)),
        Stage(130.0, (*kinds,)),
    ]


def command_b(files: Sequence[Path] | None = None) -> list[Stage]:
    return [Stage(440.0, kernel_tasks(kernel_files() if files is None else files))]


def command_c(tool: str | None) -> list[Stage]:
    """Measurements are alone on the machine; `tool` is compute-sanitizer, None where it is not."""
    benchmark = "tests.gpu.benchmark"
    return [
        Stage(70.0, (Task("attention", "sdpa", f"{benchmark}:measure_attention"),), 1),
        Stage(50.0, (Task("sampling", "accept", "tests.gpu.sampling:measure"),), 1),
        Stage(30.0, (Task("collectives", "nccl", "tests.gpu.collectives:measure"),), 1),
        Stage(120.0, sanitizer_tasks(tool)),
        Stage(70.0, (Task("attention", "flex", f"{benchmark}:measure_flex"),), 1),
        Stage(110.0, (Task("transformers", "8b-1b", "tests.gpu.generation:measure"),), 1),
    ]


def shape_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """Cases of `shapes`: each waits for the GPU while it traces."""
    entry, result_s = "tests.gpu.shapes:measure", 2 * LIMIT_S
    return tuple(Task("shapes", name, entry, {"name": name}, 30.0, result_s) for name in names)


def sweep(name: str, entry: str, seconds: float, **arguments: Any) -> Stage:
    """Candidates of products, alone on the machine."""
    given = {"seconds": seconds - 10.0, **arguments}
    task = Task("sweep", name, f"tests.gpu.{entry}:measure", given, 20.0, 15.0, is_resumed=True)
    # the first result comes after imports and the weights
    return Stage(seconds, (replace(task, result_s=40.0),), 1)


def command_d() -> list[Stage]:
    return [
        sweep("quantized", "quantized_sweep", 160.0),
        Stage(250.0, shape_tasks(DENSE), TRACING),
    ]


def command_e(tool: str | None) -> list[Stage]:
    files = [ROOT / f"tests/kernels/cuda/test_{name}.py" for name in NEW_KERNELS]
    return [
        Stage(120.0, shape_tasks(SPARSE), TRACING),
        Stage(120.0, kernel_tasks(files)),
        sweep("quantized, many rows", "quantized_sweep", 60.0, rows=[16, 32]),
        Stage(120.0, sanitizer_tasks(tool, NEW_SANITIZED)),
    ]


def command_r() -> list[Stage]:
    """Its process may be ended by the library; the next one goes on with what follows."""
    task = Task("tensorrt", "rtx", "tests.gpu.tensorrt_check:check", {}, 20.0, 120.0, True)
    return [Stage(240.0, (task,), 1)]


def command_s() -> list[Stage]:
    from tests.gpu.shapes import CASES

    return [Stage(450.0, shape_tasks([*CASES]), TRACING)]


def command_t() -> list[Stage]:
    return [sweep("tiles", "sweep_tiles", 90.0)]


def commands(
    tool: str | None = None, files: Sequence[Path] | None = None
) -> dict[str, list[Stage]]:
    return {
        "A": command_a(), "B": command_b(files), "C": command_c(tool), "D": command_d(),
        "E": command_e(tool), "R": command_r(), "S": command_s(), "T": command_t(),
    }  # fmt: skip
