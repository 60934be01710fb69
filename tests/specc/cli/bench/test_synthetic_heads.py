"""`specc bench --synthetic TARGET --draft HEAD`: whole runs on a simulated device, bad input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from specc.bench import device as bench_device
from specc.bench.synthetic.drafters import HEADS
from specc.cli.bench.shape_plans import choose_shape_plans
from specc.cli.options.bench import ShapesOptions
from tests import command_line
from tests.command_line import assert_refused
from tests.models import tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.tiers import only

invoke = partial(command_line.invoke, "bench")
QUICK = ("--context", 20, "--tokens", 13, "--rounds", 1, "--warmup", 0)


@pytest.fixture(autouse=True)
def target(tmp_path, monkeypatch) -> None:
    """Directories of configurations, in the working directory."""
    for name, kind in (("target", "Llama"), ("other", "Qwen3")):
        config = tiny_config(
            kind.lower(), num_hidden_layers=8, architectures=[f"{kind}ForCausalLM"]
        )
        config.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)


# a head that drafts level by level; of blocks test_heads.py of shapes counts passes and bytes, and
# replays steps
@pytest.mark.parametrize("head", only(("eagle3",), HEADS))
def test_the_whole_report(head, monkeypatch):
    """Dice, drawn tokens, stages and rounds; transformers has no draft like it."""
    simulated = SimulatedDevice()
    monkeypatch.setattr(bench_device, "open_device", lambda: (simulated, "cuda"))
    # DSpark is published for Qwen3 alone
    name = "other" if head == "dspark" else "target"
    result = invoke(
        "--synthetic", name, "--draft", head, *QUICK, "--tree", "2,1", "--tree", "1,1,1",
        "--synthetic-acceptance", ".9", "--against", "transformers", "--json", "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(Path("out.json").read_text())
    assert report["settings"]["draft"] == head
    assert [model["source"] for model in report["engine"]["models"]] == [name, head]
    runs = report["runs"]
    plans = ["off", "tree-2-1", "chain-3", None]
    assert [run["plan"] for run in runs] == plans
    off, *speculative = [run["step"] for run in runs[:-1]]
    for step in speculative:
        assert step["is_captured"]
        assert list(step["stage_ms"]) == ["draft", "verify", "draw", "accept_commit"]
        assert step["sampled"]["ms"] > 0
        assert step["acceptance_length"] == pytest.approx(
            step["expected_acceptance_length"], abs=0.5
        )
        parts = step["bytes_parts"]
        assert parts["features"] > 0
        assert sum(parts.values()) == step["bytes"]
    assert off["bytes_parts"]["features"] == off["bytes_parts"]["draft_weights"] == 0
    # a pass for each level of EAGLE-3, one for all of a block
    tree, chain = (step["bytes_parts"]["draft_weights"] for step in speculative)
    if head == "dspark":
        # and for each level the product that depends on tokens
        assert 1 < chain / tree < 1.5
    else:
        assert chain / tree == (1.5 if head == "eagle3" else 1)
    # said once, and not because something was tried that fails
    (note,) = [note for note in report["notes"] if "transformers-assisted" in note]
    assert note.endswith(f"left out: it has no draft like {head}, a head")
    assert head in result.stdout


@pytest.mark.slow
def test_too_little_memory_names_target_and_head(monkeypatch):
    monkeypatch.setattr(bench_device.RepeatingDevice, "free_bytes", lambda self: 1000)
    result = invoke("--synthetic", "target", "--draft", "eagle3", *QUICK)
    assert_refused(result, "1000 bytes of memory free", "target ", "eagle3 ")


@pytest.mark.parametrize(
    ("acceptance", "plan"), [(None, "chain-4"), ([0.8], "chain-4"), ([0.7, 0.1], "tree-2-1-1-1")]
)
def test_plans_without_a_tree(acceptance, plan):
    """As of a draft of another shape."""
    options = ShapesOptions(synthetic="T", draft="dflash")
    plans = choose_shape_plans(options, acceptance, has_draft=False)
    assert [item.name for item in plans] == [plan, "off"]


@pytest.mark.slow
def test_an_estimate():
    pytest.importorskip("triton")
    args = ("--synthetic", "target", "--draft", "eagle3", "--tree", "dynamic:8,3,3", *QUICK)
    result = invoke(*args, "--quantize", "int8", "--estimate", "--json", "out.json")
    assert result.exit_code == 0, result.output
    assert "; projections of the target in int8" in " ".join(result.stdout.split())
    report = json.loads(Path("out.json").read_text())
    assert report["settings"]["draft"] == "eagle3"
    assert report["plans"]["dynamic-8-3-3"]["models"]["draft"]["passes"] == 3
    assert "draft eagle3: 1 layer\n" in result.stdout


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ("llama-3.1-8b/llama-3.2-1b", ("--draft", "eagle3"), "one draft: another shape, or a head"),
        ("target", ("--draft", "eagle2"), "self:window=W,sink=S, eagle3, dflash, dspark, medusa"),
        (
            "target",
            ("--draft", "eagle3", "--tree", "dynamic:8,3,3", "--synthetic-acceptance", ".8"),
            "the plan dynamic-8-3-3",
        ),
        ("target", ("--draft", "dspark"), "a target of the shape of qwen3"),
        ("target", ("--draft", "dflash", "--num-speculative-tokens", 12), "chain-12 of depth 12"),
    ],
)
def test_heads_that_cannot_be(shapes, options, words):
    assert_refused(invoke("--synthetic", shapes, *options, *QUICK), words)


def test_targets_without_heads(tmp_path):
    tiny_config("gemma3", architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path / "third")
    result = invoke("--synthetic", "third", "--draft", "dflash", *QUICK)
    assert_refused(result, "--draft dflash, and third", "llama or qwen3", "TARGET/DRAFT")
