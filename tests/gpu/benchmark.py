"""Figures of speed: 8B and 1B shapes with random weights, and tree attention.

What the project's bars are about comes first, and everything is a result of its own: time that
runs out costs what was not measured yet.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.results import Device, Results

ROOT = Path(__file__).resolve().parents[2]
SHAPES = "llama-3.1-8b/llama-3.2-1b"
CHAIN, ACCEPTANCE = 5, "0.8"
CONTEXT, TOKENS, ROUNDS = 1024, 96, 2
ATTENTION_ROUNDS = 20
# the bar of attention is about this case
LONG_CASE = "batch 1, 32 nodes, 32k"
_CHAIN = "chain of 5 at 0.8 over off"
TORCH = ("SDPA", "packed SDPA")


def measure_steps(results: Results, device: Device) -> None:
    """Steps by themselves, plan by plan; then generation with them, and the bars.

    A bar that is missed is recorded and fails nothing. A step that runs operator by operator,
    because its capture failed, does.
    """
    device.prepare()
    count = count_compiles(device)
    products.watch(results)

    def on_steps(plan: str, figures: dict[str, Any]) -> None:
        from specc.runtime.backends.cuda import choose_launches, choose_products

        if choose_launches.measured:
            # of each plan ms of a step with ordinary launches and dependent ones, and the choice
            results.note(launches=choose_launches.measured)
        if choose_products.measured:
            results.note(products=choose_products.measured)
        state = "passed" if figures["is_captured"] else "failed"
        results.end(f"steps of {plan}", state, figures)
        results.note(compiles=count())

    report = _measure_shapes(results, on_steps)
    results.end("report", "passed", report)
    results.end("bars", "passed", bars(report, None))
    if reasons := [note for note in report["notes"] if "cannot be captured" in note]:
        results.end("captures", "failed", reasons)


def _measure_shapes(
    results: Results, on_steps: Callable[[str, dict[str, Any]], object]
) -> dict[str, Any]:
    from specc.cli.bench.synthetic import measure_shapes
    from specc.cli.options.bench import BenchOptions, ShapesOptions
    from specc.progress import PhaseTimer

    shapes = ShapesOptions(SHAPES, context=CONTEXT, num_speculative_tokens=CHAIN)
    common = BenchOptions(tokens=TOKENS, rounds=ROUNDS, synthetic_acceptance=ACCEPTANCE)
    seconds: dict[str, float] = {}

    def listen(event: Any) -> None:
        # where it dies or hangs, and how long all that took
        if event.seconds is None:
            results.begin(event.phase)
        else:
            seconds[event.phase] = round(event.seconds, 2)
            results.note(phases=seconds)

    return measure_shapes(shapes, common, PhaseTimer(listen), on_steps)


def measure_attention(
    results: Results, device: Device, names: Sequence[str] = ("specc", *TORCH)
) -> None:
    """`specc::attend` beside torch's SDPA, the case of the bar first."""
    device.prepare()
    import torch

    script = load_script("attention_cuda")
    torch.manual_seed(0)
    own = torch.device(device.place)
    bandwidth = script.measure_copy_bandwidth(own)
    results.note(copy_bandwidth=bandwidth)
    cases = sorted(script.CASES, key=lambda case: case.name != LONG_CASE)
    for case in cases:

        def run(case: Any = case) -> dict[str, Any]:
            found = script.run_case(case, own, ATTENTION_ROUNDS, bandwidth["gb_s"], names)
            # what is left of it would be in the way of the next one
            torch.compiler.reset()
            if device.kind == "cuda":
                torch.cuda.empty_cache()
            assert "us" in found["contenders"]["specc"], found["contenders"]["specc"]
            return found | {"bars": bars(None, found)}

        results.check(case.name, run)


def measure_flex(results: Results, device: Device) -> None:
    """Beside FlexAttention, which is compiled for each case."""
    measure_attention(results, device, ("specc", "FlexAttention"))


def _sampled_ratio(run: dict[str, Any]) -> float | None:
    """None where drawn steps could not be timed."""
    sampled = run["step"]["sampled"]
    return sampled and sampled["floor_ratio"]


def bars(steps: dict[str, Any] | None, attention: dict[str, Any] | None) -> dict[str, Any]:
    """What the project wants of one H200, beside what was found: value, limit, whether it is met.

    Args:
        steps: report of `specc bench --synthetic`; None where it did not end.
        attention: a case of tests/measure/attention_cuda.py; None likewise.
    Returns:
        bar → value, limit, met; those of a speedup also have what the dice gave and should give.
    """
    values: dict[str, tuple[float | None, str, float]] = {}
    lengths: dict[str, dict[str, float]] = {}
    if steps is not None:
        off, chain = (_run(steps, name) for name in ("off", "speculative"))
        shares = [run["step"]["gap_share"] for run in (off, chain)]
        speedup = chain["decode_tokens_per_s"] / off["decode_tokens_per_s"]
        values = {
            "off over its floor": (off["step"]["floor_ratio"], "<=", 1.15),
            "step over its floor": (chain["step"]["floor_ratio"], "<=", 1.25),
            "off over its floor, temperature .6, top-p .9": (
                _sampled_ratio(off),
                "<=",
                1.15,
            ),
            "step over its floor, temperature .6, top-p .9": (
                _sampled_ratio(chain),
                "<=",
                1.25,
            ),
            "gap between queued replays": (None if None in shares else max(shares), "<=", 0.02),
            "time of a step beyond its replay": (chain["step"]["host_share"], "<=", 0.02),
            _CHAIN: (speedup, ">=", 1.8),
            f"{_CHAIN}, stretch": (speedup, ">=", 2.0),
        }
        lengths = dict.fromkeys((_CHAIN, f"{_CHAIN}, stretch"), _lengths(chain, speedup))
    if attention is not None and attention["name"] == LONG_CASE:
        share = attention["contenders"]["specc"].get("copy_share")
        values["tree attention over copy bandwidth"] = (share, ">=", 0.75)
        if attention["best_of_torch"] in TORCH:
            ratio = attention["speedup_over_torch"]
            values["tree attention over torch's best"] = (ratio, ">=", 1.2)
    return {
        name: {"value": value, "limit": f"{sign} {limit}", "met": _is_met(value, sign, limit)}
        | lengths.get(name, {})
        for name, (value, sign, limit) in values.items()
    }


def load_script(name: str) -> ModuleType:
    """A script of tests/measure as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "measure" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _lengths(chain: dict[str, Any], speedup: float) -> dict[str, float]:
    """What a few dozen draws gave beside what the acceptance leads to: a speedup carries it."""
    drawn = chain["synthetic_acceptance"]["drawn_acceptance_length"]
    expected = chain["synthetic_acceptance"]["expected_acceptance_length"]
    return {
        "drawn_length": drawn,
        "expected_length": expected,
        "value_at_expected_length": speedup * expected / drawn,
    }


def _run(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(run for run in report["runs"] if run["name"] == name)


def _is_met(value: float | None, sign: str, limit: float) -> bool | None:
    """None where nothing was measured."""
    if value is None:
        return None
    return value <= limit if sign == "<=" else value >= limit
