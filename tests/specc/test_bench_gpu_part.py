"""The benchmark of the GPU check, without a GPU: its bars, its process, and its whole course."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specc import bench_device
from tests.gpu import benchmark
from tests.models import tiny_config
from tests.runtime.simulated_device import SimulatedDevice


def steps(floors: tuple[float, float], gaps: tuple[Any, Any], rates: tuple[float, float]) -> Any:
    names = ("off", "speculative")
    dice = {"drawn_acceptance_length": 3.2, "expected_acceptance_length": 4.0}
    return {
        "runs": [
            {
                "name": name,
                "decode_tokens_per_s": rates[i],
                "synthetic_acceptance": dice if name == "speculative" else None,
                "step": {"floor_ratio": floors[i], "gap_share": gaps[i], "host_share": 0.1 * i},
            }
            for i, name in enumerate(names)
        ]
    }


def attention(share: float | None, ratio: float | None) -> Any:
    own = {"error": "x"} if share is None else {"copy_share": share}
    return {"results": [{"contenders": {"specc": own}, "speedup_over_torch": ratio}]}


def test_bars_that_are_met_and_missed():
    found = benchmark.bars(steps((1.1, 1.3), (0.001, 0.03), (100, 190)), attention(0.71, 1.1))
    assert {name: item["met"] for name, item in found.items()} == {
        "off over its floor": True,
        "step over its floor": False,
        "gap between queued replays": False,
        "time of a step beyond its replay": False,
        "chain of 5 at 0.8 over off": True,
        "chain of 5 at 0.8 over off, stretch": False,
        "tree attention over copy bandwidth": True,
        "tree attention over torch's best": False,
    }
    # 32 draws gave a length of 3.2, where 4 is expected
    lengths = {"drawn_length": 3.2, "expected_length": 4.0}
    assert found["chain of 5 at 0.8 over off"] == {
        "value": 1.9,
        "limit": ">= 1.7",
        "met": True,
        "value_at_expected_length": pytest.approx(2.375),
        **lengths,
    }
    assert lengths.items() <= found["chain of 5 at 0.8 over off, stretch"].items()
    assert set(found["off over its floor"]) == {"value", "limit", "met"}
    assert found["gap between queued replays"]["value"] == 0.03


def test_bars_without_figures():
    """What was not measured is neither met nor missed."""
    found = benchmark.bars(None, attention(None, None))
    assert [item["met"] for item in found.values()] == [None, None]
    found = benchmark.bars(steps((1.1, 1.2), (None, 0.01), (100, 150)), None)
    assert found["gap between queued replays"]["met"] is None
    assert benchmark.bars(None, None) == {}


def test_a_process_that_fails_is_told(monkeypatch, tmp_path):
    """Its output and what it had written; beside one that works, and one that is too slow."""
    body = (
        "import json, pathlib, sys; pathlib.Path({!r}).write_text(json.dumps({{'attention': 1}}));"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def run(rest: str, timeout_s: float = 60.0) -> dict[str, Any]:
        process = benchmark.subprocess.run

        def other(command: list[str], **options: Any) -> Any:
            output = command[-1].split("'")[1]
            return process([*command[:-1], body.format(output) + rest], **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark.subprocess, "run", other)
            return benchmark.run_benchmark(timeout_s)

    assert run("pass") == {"state": "passed", "attention": 1}
    failed = run("print('no memory'); sys.exit(3)")
    assert (failed["state"], failed["attention"]) == ("failed", 1)
    assert failed["error"] == "exit status 3: no memory\n"
    slow = run("import time; print('here', flush=True); time.sleep(60)", 3.0)
    assert slow["state"] == "failed"
    assert slow["error"] == "out of time: here\n"


def test_the_whole_course(monkeypatch, tmp_path):
    """Both benchmarks on the simulated device, with shapes and cases that a CPU computes."""
    for name, layers in (("t", 2), ("d", 1)):
        config = tiny_config("llama", num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path / name)
    simulated = SimulatedDevice()
    monkeypatch.setattr(bench_device, "open_device", lambda: (simulated, "cuda"))
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(benchmark, "SHAPES", f"{tmp_path}/t,{tmp_path}/d")
    monkeypatch.setattr(benchmark, "CONTEXT", 20)
    monkeypatch.setattr(benchmark, "TOKENS", 13)
    monkeypatch.setattr(benchmark, "ATTENTION_ROUNDS", 1)
    load = benchmark.load_example

    def tiny(name: str) -> Any:
        module = load(name)
        module.CASES = module.TINY[1:]
        return module

    monkeypatch.setattr(benchmark, "load_example", tiny)
    benchmark.measure(str(tmp_path / "out.json"))
    found = json.loads(Path(tmp_path / "out.json").read_text())
    assert set(found) == {"attention", "steps", "bars"}
    assert len(found["bars"]) == 8
    assert all(isinstance(item["met"], bool) for item in found["bars"].values())
    assert found["steps"]["runs"][1]["plan"] == "chain-5"
    assert found["steps"]["settings"]["synthetic_acceptance"] == [0.8]
    chain = found["bars"]["chain of 5 at 0.8 over off"]
    assert chain["expected_length"] == pytest.approx(3.68928)
    assert 1 < chain["drawn_length"] < 6
