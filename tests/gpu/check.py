"""What needs a GPU: kernels against oracles, replays against eager steps, output, measurements.

    make gpu-check            or    python tests/gpu/check.py [--output FILE] [--only PART …]

Takes a Python with torch and triton; parts that compile models need transformers, too. Writes
JSON to --output, else to $OUT/gpu_check.json, else to docs/results/gpu_check.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    options = parser.parse_args()
    _make_importable()
    import torch
    import triton

    if not torch.cuda.is_available():
        print("found:  no GPU that torch can use\nneeded: one NVIDIA GPU\ndo:     run it there")
        return 2
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }
    output = options.output or _default_output()
    for name in options.only or PARTS:
        begin = time.perf_counter()
        print(f"{name} …", flush=True)
        try:
            report[name] = PARTS[name]()
        except Exception:
            report[name] = {"state": "failed", "error": traceback.format_exc(limit=-6)}
        report[name]["seconds"] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {report[name].get('state')} in {report[name]['seconds']} s", flush=True)
        # after every part: a run that is cut off leaves what it has
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)
    return int(any(report[name].get("state") == "failed" for name in options.only or PARTS))


def check_kernels() -> dict[str, Any]:
    """Every test of the Triton kernels, on the GPU, with real sizes added."""
    from tests.gpu import runner

    runner.install()
    outcomes = []
    for path in sorted((ROOT / "tests/kernels/cuda").glob("test_*.py")):
        if path.stem in ("test_interpreter", "test_budgets"):
            continue
        found = runner.run_file(path, ROOT, lambda o: o.state == "failed" and print(o.name))
        outcomes += found
        counts = {s: sum(o.state == s for o in found) for s in ("passed", "failed", "skipped")}
        print(f"  {path.stem}: {counts}", flush=True)
    failed = [o for o in outcomes if o.state == "failed"]
    return {
        "state": "failed" if failed or not outcomes else "passed",
        "num_passed": sum(o.state == "passed" for o in outcomes),
        "failed": {o.name: o.message[-1500:] for o in failed[:20]},
        "num_failed": len(failed),
        "skipped": [o.name for o in outcomes if o.state == "skipped"],
        "slowest": {
            o.name: round(o.seconds, 2) for o in sorted(outcomes, key=lambda o: -o.seconds)[:5]
        },
    }


def check_replay() -> dict[str, Any]:
    """A replayed step equals the same operators one by one, on the same inputs and caches."""
    import torch

    found: dict[str, Any] = {"state": "passed", "plans": {}}
    with tempfile.TemporaryDirectory() as scratch:
        engine = _pair_engine(Path(scratch) / "pair", "float32")
        for plan, step in engine.steps.items():
            for batch in (1, 3, 8):
                same = _replays_alike(engine, step, batch)
                found["plans"][f"{plan}-{batch}"] = same
                if not (same["equal"] and same["is_captured"]):
                    found["state"] = "failed"
        free, total = torch.cuda.mem_get_info()
        found["memory_in_use_mib"] = (total - free) >> 20
    return found


def _replays_alike(engine: Any, step: Any, batch: int) -> dict[str, Any]:
    import torch

    slabs = engine.cache.environment
    table = torch.arange(engine.cache.shape.num_blocks, dtype=torch.int32)
    table = table.view(engine.cache.shape.max_num_seqs, -1)[:batch]
    rows = [(5 + b, 9 + b, 11 + 7 * b) for b in range(batch)]
    results = []
    for is_replayed in (True, False):
        generator = torch.Generator(device="cuda").manual_seed(3)
        for slab in slabs.values():
            slab.normal_(generator=generator)
        bucket = step.bucket_of(batch)
        step.capture(bucket)
        key = (bucket, False)
        captured = step._captured[key]
        if not is_replayed:
            step._captured[key] = None
        mine = step.advance(rows, table, slabs)[:4]
        step._captured[key] = captured
        torch.cuda.synchronize()
        results.append((mine, {name: slab.clone() for name, slab in slabs.items()}))
    (first, caches), (second, others) = results
    equal = first == second and all(torch.equal(caches[n], others[n]) for n in caches)
    return {"equal": equal, "is_captured": captured is not None}


def check_output() -> dict[str, Any]:
    """Greedy output of the demo pair equals transformers', token for token, but for near ties.

    In bfloat16 a tie is two tokens that are closer in exact arithmetic than the target's own
    rounding error at that position.
    """
    from tests.gpu import runner

    runner.install()
    import torch
    from transformers import AutoModelForCausalLM

    from specc.config import SamplingParams
    from specc.runtime.llm import LLM
    from tests.lossless import Tie, forgive_near_ties, require_near_tie

    def load(dtype: str) -> Any:
        target = ROOT / "examples/pair/target"
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
        model.generation_config.eos_token_id = None
        return model.cuda().eval()

    exact = load("float32")
    report: dict[str, Any] = {"state": "passed"}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float32", "bfloat16"):
            engine, model = _pair_engine(Path(scratch) / dtype, dtype), load(dtype)

            def rule(prompt: Any, reference: Any, tie: Tie, model: Any = model) -> None:
                error = _error(model, exact, [*prompt, *reference.tokens[: tie.position]], tie)
                assert error > 0, tie

            prompts = [engine.tokenizer.encode(p).ids for p in _prompts(8)]
            references = [_generate(model, ids, 64) for ids in prompts]
            for plan in engine.plans:
                llm = LLM(engine, plan=plan)
                params = SamplingParams(max_tokens=64, ignore_eos=True)
                ties: list[Tie] = []
                for ids, reference, output in zip(
                    prompts, references, llm.generate(prompts, params), strict=True
                ):
                    found = list(output.outputs[0].token_ids)
                    chosen = require_near_tie if dtype == "float32" else rule
                    ties += forgive_near_ties(llm, plan, ids, found, reference, chosen)
                report[f"{dtype}-{plan}"] = {"tokens": 64 * len(prompts), "near_ties": len(ties)}
    return report


def _error(model: Any, exact: Any, tokens: list[int], tie: Any) -> float:
    """The rounded model's error at a position, less the exact distance of two tokens there."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([tokens], device="cuda")
        rounded = model(ids, use_cache=False).logits[0, -1].float()
        wanted = exact(ids, use_cache=False).logits[0, -1].float()
    gap = abs(float(wanted[tie.wanted] - wanted[tie.found]))
    return float((rounded - wanted).abs().max()) - gap


def _generate(model: Any, ids: list[int], count: int) -> Any:
    import torch

    from tests.lossless import Reference

    with torch.inference_mode():
        result = model.generate(
            torch.tensor([ids], device="cuda"),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device="cuda"),
            max_new_tokens=count,
            # goes on behind EOS, as requests with ignore_eos do; min_new_tokens would mask it
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(result.logits)[:, 0].float().cpu()
    return Reference(result.sequences[0, len(ids) :].tolist(), logits)


def check_questions() -> dict[str, Any]:
    """For the record: AOTInductor under capture, Triton operators in a .pt2, memory of graphs."""
    return {
        "state": "passed",
        "triton_operator_in_pt2": _try(_triton_in_package),
        "graph_memory_mib": _try(_graph_memory),
        # last: a capture that fails may leave torch in any state
        "aot_program_twice_in_one_capture": _try(_aot_twice),
    }


def _try(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        return f"no: {type(error).__name__}: {text[:300]}"


def _aot_twice() -> str:
    import torch

    layer = torch.nn.Linear(64, 64).cuda().eval()
    x = torch.randn(4, 64, device="cuda")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(layer, (x,)), package_path=f"{scratch}/layer.pt2"
        )
        run = torch._inductor.aoti_load_package(package, run_single_threaded=True)
        run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(run(x))
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        close = torch.allclose(out, layer(layer(x)), atol=1e-3)
    return "yes" if close else "no: another result"


def _triton_in_package() -> str:
    import torch
    import triton

    from tests.gpu.double_kernel import double_kernel

    @torch.library.triton_op("specc_check::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(double_kernel)[(triton.cdiv(x.numel(), 128),)](
            x, out, x.numel(), BLOCK=128
        )
        return out

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x) + 1

    x = torch.randn(300, device="cuda")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(Module(), (x,)), package_path=f"{scratch}/double.pt2"
        )
        found = torch._inductor.aoti_load_package(package)(x)
    return "yes" if torch.equal(found, 2 * x + 1) else "no: another result"


def _graph_memory() -> dict[str, float]:
    """Device memory that capturing each plan for one and for eight sequences takes."""
    import torch

    from specc.runtime.cuda_backend import CaptureLimits

    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        engine = _pair_engine(Path(scratch) / "pair", "bfloat16", CaptureLimits(max_seconds=-1))
        for plan, step in engine.steps.items():
            for bucket in (8, 1):
                torch.cuda.synchronize()
                before = torch.cuda.mem_get_info()[0]
                step.capture(bucket)
                torch.cuda.synchronize()
                found[f"{plan}-{bucket}"] = (before - torch.cuda.mem_get_info()[0]) / 2**20
    return found


def check_sanitizer() -> dict[str, Any]:
    """compute-sanitizer over one file of kernel tests, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"state": "skipped", "reason": "no compute-sanitizer"}
    code = (
        "from pathlib import Path; from tests.gpu import runner; runner.install();"
        f"found = [o for n in ('commit_kv', 'write_kv') for o in runner.run_file("
        f"Path({str(ROOT)!r}) / f'tests/kernels/cuda/test_{{n}}.py', Path({str(ROOT)!r}))];"
        "assert found and all(o.state != 'failed' for o in found)"
    )
    result = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    state = "passed" if result.returncode == 0 else "failed"
    return {"state": state, "output": result.stdout[-1500:] + result.stderr[-500:]}


def _pair_engine(path: Path, dtype: str, capture: Any = None) -> Any:
    from specc.api import compile_with
    from specc.config import CompileConfig, SpecPlan
    from specc.runtime.engine import Engine

    plans = (SpecPlan.from_widths((1,) * 4), SpecPlan.from_widths((3, 2, 1)))
    config = CompileConfig(plans=plans, dtype=dtype, max_seq_len=512, backend="cuda", probe=False)
    pair = ROOT / "examples/pair"
    compile_with(str(pair / "target"), str(pair / "draft"), path, config)
    return Engine.load(path, capture=capture)


def _prompts(count: int) -> list[str]:
    lines = (ROOT / "examples/pair/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def _default_output() -> Path:
    directory = os.environ.get("OUT")
    return Path(directory or ROOT / "docs/results") / "gpu_check.json"


def _make_importable() -> None:
    """`specc` without an installation: links that give the folders their import names."""
    os.environ.pop("TRITON_INTERPRET", None)
    site = Path(tempfile.mkdtemp(prefix="specc-site-"))
    (site / "specc").mkdir()
    for item in [
        *(ROOT / "specc").iterdir(),
        *(ROOT / f for f in ("passes", "runtime", "kernels")),
    ]:
        (site / "specc" / item.name).symlink_to(item)
    (site / "tests").symlink_to(ROOT / "tests")
    # a package called tests may be installed, and would win over a folder without __init__.py
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
    sys.path[:0] = [str(site), str(ROOT)]


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": check_kernels,
    "replay": check_replay,
    "output": check_output,
    "sanitizer": check_sanitizer,
    "questions": check_questions,
}

if __name__ == "__main__":
    sys.exit(main())
