"""What needs a GPU: speed, replays, output, kernels against oracles, memory accesses.

    python3 -P tests/gpu/check.py A      the step benchmark, replays, output, other kinds
    python3 -P tests/gpu/check.py B      every test of the Triton kernels
    python3 -P tests/gpu/check.py C      attention, sampling, compute-sanitizer
    python3 -P tests/gpu/check.py D      products by quantized weights, and steps of 8B with them
    python3 -P tests/gpu/check.py E      mixtures, latent attention, kernels that never ran
    python3 -P tests/gpu/check.py R      an engine of TensorRT-RTX
    python3 -P tests/gpu/check.py S      steps of all published shapes
    python3 -P tests/gpu/check.py T      tiles of products in bfloat16

Each ends within 8 minutes and is of use alone; without a name A, B and C run in this order. Nothing
has to be installed: a Python with torch and triton, and transformers where models are compiled.
pytest is used where it is.

Results go into $OUT/gpu_check.json, else docs/results/gpu_check.json, or --output FILE, each as
soon as it is known. What that file, docs/results/gpu_check.json or --earlier FILE already has of
the same source, GPU and versions is not done again. Exit status: 0 where all passed, 1 where
something failed, 2 without a GPU, 3 where time ran out before all was done.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs/results/gpu_check.json"


def main() -> int:
    # ends what runs, and writes what is known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _load_importable().importable() as site:
        from tests.gpu import facts, importable

        options = parse(sys.argv[1:])
        environment = importable.environment(site)
        try:
            found = facts.device_facts(environment)
        except facts.NoDevice as error:
            print(f"found:  {error}\nneeded: one NVIDIA GPU\ndo:     run it there")
            return 2
        return run(options, found, environment)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options; a name that nothing has is refused with the list of names."""
    from tests.gpu import tasks

    plan = tasks.commands()
    all_tasks = [task for stages in plan.values() for stage in stages for task in stage.tasks]
    parts, names = ({getattr(task, key) for task in all_tasks} for key in ("part", "name"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", metavar="COMMAND")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--earlier", type=Path, nargs="+", default=[])
    parser.add_argument("--again", action="store_true", help="take nothing from earlier files")
    parser.add_argument("--only", nargs="+", choices=sorted(parts), help="these parts")
    parser.add_argument(
        "--tasks", nargs="+", choices=sorted(names), metavar="NAME", help="tasks of these names"
    )
    parser.add_argument(
        "--files",
        nargs="+",
        choices=[path.stem for path in tasks.kernel_files()],
        help="these files of kernel tests, with command B",
    )
    parser.add_argument(
        "--limit-s", type=float, default=tasks.LIMIT_S, help="seconds of each command"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.commands) - set(plan):
        parser.error(f"unknown command {', '.join(sorted(unknown))}: choose from {', '.join(plan)}")
    options.commands = options.commands or (["B"] if options.files else ["A", "B", "C"])
    return options


def run(
    options: argparse.Namespace,
    device_facts: Mapping[str, Any],
    environment: Mapping[str, str],
    device: str = "cuda",
    stages: Mapping[str, Sequence[Any]] | None = None,
    scale: float = 1.0,
) -> int:
    """Run the commands that were asked for; returns the exit status.

    Args:
        device_facts: see `facts.device_facts`.
        device: see `results.Device`.
        stages: of each command; None are those of `tasks`.
        scale: of all times; below 1 in rehearsals.
    """
    from tests.gpu import facts, tasks
    from tests.gpu.report import Report
    from tests.gpu.schedule import Scheduler
    from tests.gpu.task_code import code_of

    tool = facts.sanitizer()
    if stages is None:
        files = [p for p in tasks.kernel_files() if p.stem in (options.files or [p.stem])]
        stages = tasks.commands(tool, files)
    known = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    known |= {**device_facts, **facts.source_facts(), "compute_sanitizer": tool}
    report = Report(options.output or _default_output(), known)
    if not options.again:
        for line in report.take_over([report.path, COMMITTED, *options.earlier]):
            print(line)
    for task in (t for name in options.commands for stage in stages[name] for t in stage.tasks):
        report.keep_if(task.part, task.name, code_of(task))
    scheduler = Scheduler(report, environment, device, scale)
    states = []
    for name in options.commands:
        chosen = [tasks.chosen(stage, options.only, options.tasks) for stage in stages[name]]
        print(f"{name} …", flush=True)
        states.append(scheduler.run(name, chosen, options.limit_s * scale))
        print(f"{name}: {states[-1]} in {report.commands[name]['seconds']} s", flush=True)
    print(report.path)
    return 1 if "failed" in states else 3 if "incomplete" in states else 0


def _default_output() -> Path:
    directory = os.environ.get("OUT")
    return Path(directory) / "gpu_check.json" if directory else COMMITTED


def _load_importable() -> Any:
    """`tests.gpu.importable`, which cannot be imported by its name yet."""
    import importlib.util

    path = Path(__file__).with_name("importable.py")
    spec = importlib.util.spec_from_file_location("specc_gpu_check_importable", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
