"""What needs a GPU: kernels against oracles, replays against eager steps, output, measurements.

    make gpu-check    or    python tests/gpu/check.py [--output FILE] [--only PART …] [--files …]

Takes a Python with torch and triton; parts that compile models need transformers, too. Writes
JSON to --output, else to $OUT/gpu_check.json, else to docs/results/gpu_check.json, after every
check. `--files test_rows test_attend` runs these files of the kernel tests, and no other part
unless --only names it.
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
import traceback
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.report import Part

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--files", nargs="+", choices=[path.stem for path in kernel_files()])
    options = parser.parse_args()
    _make_importable()
    import torch
    import triton

    if not torch.cuda.is_available():
        print("found:  no GPU that torch can use\nneeded: one NVIDIA GPU\ndo:     run it there")
        return 2
    from tests.gpu.report import Report

    report = Report(
        options.output or _default_output(),
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
            },
        },
    )
    for name in options.only or (["kernels"] if options.files else PARTS):
        part = PARTS[name]
        report.run(name, partial(part, files=options.files) if name == "kernels" else part)
    print(report.path)
    return int(report.has_failed)


def kernel_files() -> list[Path]:
    """Tests of kernels that run on a GPU; the others are about the interpreter and the compiler."""
    files = sorted((ROOT / "tests/kernels/cuda").glob("test_*.py"))
    return [path for path in files if path.stem not in ("test_interpreter", "test_budgets")]


def check_kernels(part: Part, files: Sequence[str] | None = None) -> None:
    """Every test of the Triton kernels, on the GPU, with real sizes added."""
    from tests.gpu import runner

    runner.install()
    outcomes = []
    for path in kernel_files():
        if files is not None and path.stem not in files:
            continue
        try:
            found = runner.run_file(path, ROOT, lambda o: o.state == "failed" and print(o.name))
        except Exception:
            part.fail(path.stem, traceback.format_exc(limit=-6))
            continue
        outcomes += found
        counts = {s: sum(o.state == s for o in found) for s in ("passed", "failed", "skipped")}
        failed = {o.name: o.message[-1500:] for o in found if o.state == "failed"}
        print(f"  {path.stem}: {counts}", flush=True)
        note = part.fail if failed or not counts["passed"] else part.note
        note(
            path.stem,
            counts
            | {"seconds": round(sum(o.seconds for o in found), 1)}
            | {"failures": dict(list(failed.items())[:5])},
        )
    part.note("num_passed", sum(o.state == "passed" for o in outcomes))
    part.note("num_failed", sum(o.state == "failed" for o in outcomes))
    part.note("skipped_tests", [o.name for o in outcomes if o.state == "skipped"])
    slowest = sorted(outcomes, key=lambda o: -o.seconds)[:5]
    part.note("slowest", {o.name: round(o.seconds, 2) for o in slowest})


def check_replay(part: Part) -> None:
    """A replayed step equals the same operators one by one, on the same inputs and caches."""
    import torch

    from tests.gpu.pair import pair_engine

    with tempfile.TemporaryDirectory() as scratch:
        engine = pair_engine(Path(scratch) / "pair", "float32")
        for plan, step in engine.steps.items():
            for batch in (1, 3, 8):
                same = _replays_alike(engine, step, batch)
                note = part.note if same["equal"] and same["is_captured"] else part.fail
                note(f"{plan}-{batch}", same)
        free, total = torch.cuda.mem_get_info()
        part.note("memory_in_use_mib", (total - free) >> 20)


def _replays_alike(engine: Any, step: Any, batch: int) -> dict[str, Any]:
    import torch

    from specc.runtime.program import StepInputs
    from tests.mixed_sampling import mixed_sampling

    slabs = engine.cache.environment
    table = torch.arange(engine.cache.shape.num_blocks, dtype=torch.int32)
    table = table.view(engine.cache.shape.max_num_seqs, -1)[:batch]
    rows = [(5 + b, 9 + b, 11 + 7 * b) for b in range(batch)]
    inputs = StepInputs(rows, table, *mixed_sampling(batch))
    results = []
    for is_replayed in (True, False):
        generator = torch.Generator(device="cuda").manual_seed(3)
        for name, slab in slabs.items():
            if name == "history":
                slab.random_(0, engine.vocab_size, generator=generator)
            else:
                slab.normal_(generator=generator)
        bucket = step.bucket_of(batch)
        step.capture(bucket)
        key = (bucket, False)
        captured = step._captured[key]
        if not is_replayed:
            step._captured[key] = None
        mine = step.advance(inputs, slabs)[:4]
        step._captured[key] = captured
        torch.cuda.synchronize()
        results.append((mine, {name: slab.clone() for name, slab in slabs.items()}))
    (first, caches), (second, others) = results
    equal = first == second and all(torch.equal(caches[n], others[n]) for n in caches)
    return {"equal": equal, "is_captured": captured is not None}


def check_output(part: Part) -> None:
    """Greedy output of the demo pair equals transformers', token for token, but for near ties.

    In bfloat16 a tie is two tokens that are closer in exact arithmetic than the target's own
    rounding error at that position.
    """
    from tests.gpu import runner

    runner.install()
    import torch
    from transformers import AutoModelForCausalLM

    from tests.gpu.pair import pair_engine
    from tests.lossless import Tie, require_near_tie

    def load(dtype: str) -> Any:
        target = ROOT / "examples/pair/target"
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
        model.generation_config.eos_token_id = None
        return model.cuda().eval()

    exact = load("float32")
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float32", "bfloat16"):
            engine, model = pair_engine(Path(scratch) / dtype, dtype), load(dtype)
            prompts = [engine.tokenizer.encode(p).ids for p in _prompts(8)]
            references = [_generate(model, ids, 64) for ids in prompts]

            def rule(prompt: Any, reference: Any, tie: Tie, model: Any = model) -> None:
                error = _error(model, exact, [*prompt, *reference.tokens[: tie.position]], tie)
                assert error > 0, tie

            chosen = require_near_tie if dtype == "float32" else rule
            for plan in engine.plans:
                compare = partial(_compare, engine, plan, prompts, references, chosen)
                part.check(f"{dtype}-{plan}", compare)


def _compare(
    engine: Any,
    plan: str,
    prompts: Sequence[list[int]],
    references: Sequence[Any],
    rule: Callable[..., None],
) -> dict[str, int]:
    """Tokens that were compared, and those of them that differ within `rule`, which raises."""
    from specc.runtime.llm import LLM
    from specc.sampling_params import SamplingParams
    from tests.lossless import forgive_near_ties

    llm = LLM(engine, plan=plan)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    num_ties = 0
    for ids, reference, output in zip(prompts, references, outputs, strict=True):
        found = list(output.outputs[0].token_ids)
        num_ties += len(forgive_near_ties(llm, plan, ids, found, reference, rule))
    return {"tokens": 64 * len(prompts), "near_ties": num_ties}


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


def check_sanitizer(part: Part) -> None:
    """compute-sanitizer over one file of kernel tests, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        part.skip("no compute-sanitizer")
        return
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
    note = part.note if result.returncode == 0 else part.fail
    note("output", result.stdout[-1500:] + result.stderr[-500:])


def check_questions(part: Part) -> None:
    """For the record: AOTInductor under capture, Triton operators in a .pt2, memory of graphs."""
    from tests.gpu import questions

    part.note("triton_operator_in_pt2", questions.ask(questions.triton_in_package))
    part.note("graph_memory_mib", questions.ask(questions.graph_memory))
    # last: a capture that fails may leave torch in any state
    part.note("aot_program_twice_in_one_capture", questions.ask(questions.aot_twice))


def check_benchmark(part: Part) -> None:
    """Figures of speed, in a process of their own."""
    from tests.gpu.benchmark import run_benchmark

    found = run_benchmark()
    note = part.note if found.pop("state") == "passed" else part.fail
    for name, value in found.items():
        note(name, value)


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


PARTS: dict[str, Callable[[Part], None]] = {
    "kernels": check_kernels,
    "replay": check_replay,
    "output": check_output,
    "sanitizer": check_sanitizer,
    "questions": check_questions,
    "benchmark": check_benchmark,
}

if __name__ == "__main__":
    sys.exit(main())
