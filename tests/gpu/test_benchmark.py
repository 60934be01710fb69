"""The benchmark of the GPU check, without a GPU: its bars and its whole course."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specc.bench import device as bench_device
from tests.gpu import benchmark
from tests.gpu.results import Device, Results
from tests.models import tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice


def steps(floors: tuple[float, float], gaps: tuple[Any, Any], rates: tuple[float, float]) -> Any:
    names = ("off", "speculative")
    dice = {"drawn_acceptance_length": 3.2, "expected_acceptance_length": 4.0}
    return {
        "runs": [
            {
                "name": name,
                "decode_tokens_per_s": rates[i],
                "synthetic_acceptance": dice if name == "speculative" else None,
                "step": {"floor_ratio": floors[i], "gap_share": gaps[i], "host_share": 0.1 * i}
                # drawn tokens cost a tenth more
                | {"sampled": {"floor_ratio": 1.1 * floors[i]}},
            }
            for i, name in enumerate(names)
        ]
    }


def attention(share: float | None, ratio: float | None) -> Any:
    own = {"error": "x"} if share is None else {"copy_share": share}
    return {
        "name": benchmark.LONG_CASE,
        "contenders": {"specc": own},
        "speedup_over_torch": ratio,
        "best_of_torch": "SDPA",
    }


def test_bars_that_are_met_and_missed():
    found = benchmark.bars(steps((1.1, 1.3), (0.001, 0.03), (100, 190)), attention(0.76, 1.1))
    assert {name: item["met"] for name, item in found.items()} == {
        "off over its floor": True,
        "step over its floor": False,
        "off over its floor, temperature .6, top-p .9": False,
        "step over its floor, temperature .6, top-p .9": False,
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
        "limit": ">= 1.8",
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
    # the bar is about one case, and FlexAttention is compared elsewhere
    assert benchmark.bars(None, attention(0.5, 1.0) | {"name": "another"}) == {}
    found = benchmark.bars(None, attention(0.5, 1.0) | {"best_of_torch": "FlexAttention"})
    assert list(found) == ["tree attention over copy bandwidth"]


@pytest.fixture
def tiny_shapes(monkeypatch, tmp_path):
    """The simulated device, and shapes that a CPU computes."""
    for name, layers in (("t", 2), ("d", 1)):
        config = tiny_config("llama", num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path / name)
    simulated = SimulatedDevice()
    monkeypatch.setattr(bench_device, "open_device", lambda: (simulated, "cuda"))
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(Device, "prepare", lambda device: None)
    monkeypatch.setattr(benchmark, "SHAPES", f"{tmp_path}/t,{tmp_path}/d")
    monkeypatch.setattr(benchmark, "CONTEXT", 20)
    monkeypatch.setattr(benchmark, "TOKENS", 13)
    monkeypatch.setattr(benchmark, "ATTENTION_ROUNDS", 1)


@pytest.mark.slow
def test_the_whole_course(tiny_shapes, monkeypatch, tmp_path):
    """Both benchmarks on the simulated device."""
    load = benchmark.load_script

    def tiny(name: str) -> Any:
        module = load(name)
        module.CASES = module.TINY[1:]
        monkeypatch.setattr(benchmark, "LONG_CASE", module.TINY[1].name)
        return module

    monkeypatch.setattr(benchmark, "load_script", tiny)
    device = Device("simulated")
    events = tmp_path / "events"
    benchmark.measure_steps(Results(events), device)
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    results = {line["name"]: line for line in lines if "name" in line}
    # steps by themselves are there before anything generates, and off is the first of them
    assert list(results) == ["steps of off", "steps of chain-5", "report", "bars"]
    places = [i for i, line in enumerate(lines) if line.get("name", "").startswith("steps")]
    assert places[-1] < lines.index({"begin": "rounds"})
    # every plan is timed before parts of any are measured, and the first figures are there
    assert [lines[i]["name"] for i in places] == ["steps of off", "steps of chain-5"] * 2
    assert places[0] < lines.index({"begin": "capture chain-5"}) < places[1]
    assert places[1] < lines.index({"begin": "parts of off"}) < places[2]
    for i in places[:2]:
        assert (lines[i]["value"]["kernels"], lines[i]["value"]["stage_ms"]) == (None, {})
        assert lines[i]["value"]["ms"] > 0
    assert {line["state"] for line in results.values()} == {"passed"}
    for name, plan in (("steps of off", 0), ("steps of chain-5", 1)):
        early, late = results[name]["value"], results["report"]["value"]["runs"][plan]["step"]
        # generation is not measured yet
        assert early.pop("host_share") is None
        assert late.pop("host_share") is not None
        assert early == late
        assert set(early["stage_ms"]) >= {"verify", "accept_commit"}
    report, found = results["report"]["value"], results["bars"]["value"]
    assert len(found) == 8
    assert all(isinstance(item["met"], bool) for item in found.values())
    assert report["runs"][1]["plan"] == "chain-5"
    assert report["settings"]["synthetic_acceptance"] == [0.8]
    chain = found["chain of 5 at 0.8 over off"]
    assert chain["expected_length"] == pytest.approx(3.68928)
    assert 1 < chain["drawn_length"] < 6
    benchmark.measure_attention(Results(events), device)
    line = json.loads(events.read_text().splitlines()[-1])
    assert (line["name"], line["state"]) == ("tiny token", "passed")
    assert list(line["value"]["contenders"]) == ["specc", "SDPA", "packed SDPA"]
    assert len(line["value"]["bars"]) == 2


def test_a_step_without_a_graph_fails_the_check(monkeypatch, tmp_path):
    """However good its figures are."""
    figures = {"is_captured": True}
    report = {
        "notes": ["plan off for 1 sequences cannot be captured and runs operator by operator"]
    }

    def measure(results: Any, on_steps: Any) -> Any:
        on_steps("off", figures | {"is_captured": False})
        on_steps("chain-5", figures)
        return report

    monkeypatch.setattr(benchmark, "_measure_shapes", measure)
    monkeypatch.setattr(benchmark, "bars", lambda *_: {})
    monkeypatch.setattr(Device, "prepare", lambda device: None)
    benchmark.measure_steps(Results(tmp_path / "events"), Device("simulated"))
    lines = map(json.loads, (tmp_path / "events").read_text().splitlines())
    states = {line["name"]: line["state"] for line in lines if "name" in line}
    assert states == {
        "steps of off": "failed",
        "steps of chain-5": "passed",
        "report": "passed",
        "bars": "passed",
        "captures": "failed",
    }
