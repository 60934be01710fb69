"""Models of many layers as segments and as one program: what compiling and passes cost.

    python examples/measure_segments.py --output out/compile_segments.json
    python examples/measure_segments.py --passes --output out/compile_segments.json

Each engine is compiled in a process of its own with no cache warm. Then one process loads both and
runs a pass of one and of the other in turns: the two are compared within the same milliseconds,
whatever else the machine does. `--passes` takes what caches hold, which says nothing of compiling,
and writes the passes into the file that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# a script of this folder
import measure_compile

LAYERS = (8, 32, 80)
# the ratios of Llama 3 8B, at an eighth of its width
EIGHTH = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 16032,
}


def passes_of(engines: Sequence[Path], turns: int = 40) -> list[dict[str, Any]]:
    """Seconds to load engines, and of their passes: a pass of each in turn, in this process."""
    import torch

    from specc.runtime.engine import Engine

    loaded, results = [], []
    for path in engines:
        begin = time.perf_counter()
        loaded.append(Engine.load(path))
        weights = path / "target" / "weights.safetensors"
        results.append(
            {
                "load_s": round(time.perf_counter() - begin, 2),
                "pass_ms": {},
                "weights_file_bytes": weights.stat().st_size,
                "planned_bytes": loaded[-1].manifest.total_memory,
            }
        )
    for count in (1, 16):
        places = torch.arange(count)
        seconds: list[list[float]] = [[] for _ in loaded]
        for turn in range(turns):
            # neither is always the one that comes after the other
            order = list(enumerate(loaded))[:: 1 if turn % 2 else -1]
            for number, engine in order:
                inputs = (
                    places,
                    places,
                    torch.tensor([0, count], dtype=torch.int32),
                    places.int(),
                    torch.zeros(1, dtype=torch.int32),
                    None,
                    torch.arange(engine.cache.shape.blocks_per_sequence, dtype=torch.int32)[None],
                    places[-1:],
                )
                # once without a clock: the other engine has been in the processor's caches
                for _ in range(2):
                    begin = time.perf_counter()
                    engine.target(*inputs)
                seconds[number].append(time.perf_counter() - begin)
        for result, own in zip(results, seconds, strict=True):
            result["pass_ms"][str(count)] = round(statistics.median(own[10:]) * 1e3, 3)
            low, high = statistics.quantiles(own[10:], n=4)[::2]
            spread = [round(low * 1e3, 3), round(high * 1e3, 3)]
            result.setdefault("pass_quartiles_ms", {})[str(count)] = spread
    return results


def segments_beside_whole(
    shape: dict[str, int], turns: int, passes_alone: bool
) -> list[dict[str, Any]]:
    """Compile a model as segments and whole; passes in turns.

    Args:
        shape: of the model.
        turns: passes of each engine and width.
        passes_alone: compile with the caches of this user, and tell nothing of that; else each
            from nothing.
    """
    made, names = [], ("segments", "whole")
    with tempfile.TemporaryDirectory() as directory:
        measure_compile.run_apart("--write-checkpoint", directory, "--shape", json.dumps(shape))
        for name in names:
            cache = {"SPECC_CACHE_DIR": f"{directory}/{name}-cache"}
            caches = {} if passes_alone else cache
            options = ["--backend", "cpu", "--ranks", "1"]
            options += ["--segments"] * (name == "segments")
            made.append(measure_compile.run_apart("--weights", directory, *options, **caches))
            (Path(directory) / "engine-cpu").rename(Path(directory) / name)
        engines = [f"{directory}/{name}" for name in names]
        found = passes_apart(engines, turns)
    for name, entry, passes in zip(names, made, found, strict=True):
        print(
            f"{entry['num_layers']} layers, {name}: {entry['compile_s']} s,"
            f" children {entry['children_cpu_s']} s, passes {passes['pass_ms']} ms",
            flush=True,
        )
        passes |= {key: entry[key] for key in ("segments", "num_layers")}
    return found if passes_alone else [one | other for one, other in zip(made, found, strict=True)]


def passes_apart(engines: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """`passes_of` in a process of its own."""
    command = [sys.executable, __file__, "--passes-of", *engines, "--turns", str(turns)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all depths and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    depths = ",".join(map(str, LAYERS))
    parser.add_argument("--depths", default=depths, help="layers, comma-separated")
    parser.add_argument("--turns", type=int, default=200, help="passes of each engine and width")
    parser.add_argument("--output", type=Path, default=Path("compile_segments.json"))
    parser.add_argument("--passes", action="store_true", help="alone, into the file that is there")
    parser.add_argument("--passes-of", nargs="+", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.passes_of:
        print(json.dumps(passes_of(arguments.passes_of, arguments.turns)))
        return
    import torch
    import transformers

    engines = []
    for depth in map(int, arguments.depths.split(",")):
        shape = EIGHTH | {"num_hidden_layers": depth}
        engines += segments_beside_whole(shape, arguments.turns, arguments.passes)
    report = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "engines": engines,
    }
    if arguments.passes:
        known = json.loads(arguments.output.read_text(encoding="utf-8"))
        report = known | {"passes": report}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
