"""Shapes that are traced side by side and timed one by one, on the simulated device."""

from __future__ import annotations

import json

import pytest

from specc.bench import device as bench_device
from specc.errors import EngineError
from tests.gpu import shapes
from tests.gpu.results import Device, Results
from tests.models import tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The case `tiny`, of four sequences."""
    monkeypatch.setattr(bench_device, "open_device", lambda: (SimulatedDevice(), "cuda"))
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)
    for name, layers in (("t", 2), ("d", 1)):
        config = tiny_config("llama", num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path / name)
    options = {"context": 20, "num_speculative_tokens": 3}
    case = shapes._case(f"{tmp_path}/t,{tmp_path}/d", options, batch=4) | {"tokens": 9}
    monkeypatch.setitem(shapes.CASES, "tiny", case)
    monkeypatch.setattr(shapes, "LOCK", tmp_path / "lock")
    return case


def measured(path):
    """What the case leaves, by name."""
    shapes.measure(Results(path / "events"), Device("cuda"), "tiny")
    lines = [json.loads(line) for line in (path / "events").read_text().splitlines()]
    return {line["name"]: line["value"] for line in lines if "name" in line}


@pytest.mark.slow
def test_a_case_up_to_its_rounds(tiny, tmp_path):
    tiny["cuts"] = "chain-3"
    found = measured(tmp_path)
    assert found.keys() == {"cuts", "off", "chain-3"}
    assert all(found[plan]["is_captured"] for plan in ("off", "chain-3"))
    # one node to all four; steps of fewer rows are other graphs
    assert list(found["cuts"]) == ["1", "2", "3", "4"]
    assert all(ms > 0 for ms in found["cuts"].values())


@pytest.mark.slow
def test_a_case_to_its_end(tiny, tmp_path):
    tiny["stop"] = None
    found = measured(tmp_path)
    assert found["report"]["runs"]
    assert "cuts" not in found


@pytest.mark.parametrize("name", shapes.CASES)
def test_options_of_cases_are_known(name):
    """What is written there is looked at before a GPU is lent."""
    from specc.bench.synthetic.shapes import parse_shapes
    from specc.cli.bench.synthetic import choose_shape_plans
    from specc.cli.options.bench import BenchOptions, ShapesOptions

    case = shapes.CASES[name]
    options = ShapesOptions(case["shapes"], **case["options"])
    acceptance = BenchOptions(synthetic_acceptance=case["acceptance"]).settings()
    _, draft = parse_shapes(case["shapes"])
    plans = choose_shape_plans(options, acceptance.synthetic_acceptance, draft is not None)
    assert (case["cuts"] or "off") in {*(plan.name for plan in plans), "off"}


@pytest.mark.slow
def test_memory_is_what_is_free_when_the_gpu_is(tiny, tmp_path, monkeypatch):
    """Another case may have held it until then."""
    simulated = SimulatedDevice()
    free = [1 << 40]
    monkeypatch.setattr(simulated, "free_bytes", lambda: free[0])
    monkeypatch.setattr(bench_device, "open_device", lambda: (simulated, "cuda"))

    def hold(path):
        free[0] = 1
        return 0.0

    monkeypatch.setattr(shapes, "hold", hold)
    with pytest.raises(EngineError, match="1 bytes of memory free"):
        measured(tmp_path)


@pytest.mark.parametrize("name", shapes.CASES)
def test_cases_stop_at_a_phase_that_comes(name):
    """A misspelt one would be measured to its end."""
    stop = shapes.CASES[name]["stop"]
    assert stop in (None, "rounds", "parts of off")
