"""`specc bench --synthetic`: whole runs on the CPU and on the simulated device, and bad input."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.bench import device as bench_device
from specc.bench.synthetic import engine as bench_shapes_engine
from specc.cli.bench.shape_plans import choose_shape_plans
from specc.cli.options.bench import ShapesOptions
from specc.passes.step.draw_acceptance import DrawnAcceptance
from specc.runtime.backends.graph_device import GraphDevice
from specc.speculation.tree import TokenTree
from tests import command_line
from tests.command_line import assert_refused
from tests.models import VOCAB, tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.specc.cli.bench.test_engine import RUN_FIELDS as ENGINE_RUN_FIELDS

invoke = partial(command_line.invoke, "bench")

REPORT_FIELDS = [
    "schema_version", "command", "date", "machine", "versions", "device", "engine", "settings",
    "copy_bandwidth_gb_s", "copy_bandwidth", "runs", "notes",
]  # fmt: skip
BYTES = {"bytes_per_step", "bytes_per_step_parts", "read_bandwidth_share"}
RUN_FIELDS = {k: v for k, v in ENGINE_RUN_FIELDS.items() if k not in (*BYTES, "categories")}
STEP_FIELDS = {
    "ms": float,
    "ms_min": float,
    "ms_max": float,
    "num_steps": int,
    "gap_share": float,
    "host_share": float,
    "stage_ms": dict,
    "kernels": float,
    "kernel_us": dict,
    "kernels_counted": str,
    "is_captured": bool,
    "acceptance_length": float,
    "expected_acceptance_length": (float, type(None)),
    "context": float,
    "bytes": int,
    "bytes_parts": dict,
    "floor_ms": float,
    "floor_ratio": float,
    "speedup_over_off": (float, type(None)),
    "speedup_at_expected_length": (float, type(None)),
    "break_even_acceptance_length": (float, type(None)),
    "sampled": dict,
}
QUICK = ("--context", 20, "--tokens", 13, "--rounds", 2, "--warmup", 1)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)


@pytest.fixture
def pair(tmp_path, monkeypatch) -> str:
    """Directories of two configurations, without weights or tokenizer."""
    for name, layers in (("target", 2), ("draft", 1)):
        config = tiny_config("llama", num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return "target,draft"


@pytest.fixture(params=["eager", pytest.param("simulated", marks=pytest.mark.slow)])
def device(request, monkeypatch) -> GraphDevice:
    """The CPU itself, or a GPU that is simulated there."""
    if request.param == "eager":
        return bench_device.open_device()[0]
    simulated = SimulatedDevice()
    monkeypatch.setattr(bench_device, "open_device", lambda: (simulated, "cuda"))
    return simulated


def report_of(*args: object) -> dict[str, Any]:
    result = invoke(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def check_fields(item: dict[str, Any], fields: dict[str, Any]) -> None:
    assert set(item) == set(fields)
    for key, kind in fields.items():
        assert isinstance(item[key], kind), (key, item[key])


@pytest.mark.slow
def test_the_whole_report(pair, device, tmp_path):
    """Both devices: every field, the bars that are read off it, the table and the picture."""
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    options = ("--synthetic", pair, *QUICK, "--synthetic-acceptance", "0.6,0.2", "--tree", "2,1")
    result = invoke(*options, "--against", "transformers", "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert list(report) == REPORT_FIELDS
    names = ["off", "speculative", "transformers", "transformers-assisted"]
    assert [run["name"] for run in report["runs"]] == names
    for run in report["runs"]:
        check_fields(run, RUN_FIELDS | {"step": (dict, type(None))})
        assert run["num_output_tokens"] == 13
        assert run["name"] in result.stdout
    off, speculative, plain, assisted = report["runs"]
    bandwidth = report["copy_bandwidth_gb_s"]
    for run in (off, speculative):
        step = run["step"]
        check_fields(step, STEP_FIELDS)
        assert step["is_captured"]
        # one graph: its time is that of the step, not of the host
        parts = run["stage_ms_per_step"]
        assert set(parts) == {"draft", "verify", "accept_commit", "step", "host"}
        assert parts["step"] > 0 == parts["verify"]
        assert sum(parts.values()) == pytest.approx(run["ms_per_step"])
        assert step["floor_ms"] == pytest.approx(step["bytes"] / 1e6 / bandwidth)
        assert step["floor_ratio"] == pytest.approx(step["ms"] / step["floor_ms"])
        assert step["host_share"] == pytest.approx(1 - step["ms"] / run["ms_per_step"])
        assert sum(step["bytes_parts"].values()) == step["bytes"]
        assert step["ms_min"] <= step["ms"] <= step["ms_max"]
        sampled = step["sampled"]
        assert (sampled["temperature"], sampled["top_p"]) == (0.6, 0.9)
        assert sampled["floor_ratio"] == pytest.approx(sampled["ms"] / step["floor_ms"])
        assert sampled["over_greedy"] == pytest.approx(sampled["ms"] / step["ms"])
        assert sampled["ms_min"] <= sampled["ms"] <= sampled["ms_max"]
    assert plain["step"] is assisted["step"] is None
    assert list(off["step"]["stage_ms"]) == ["verify", "accept_commit"]
    assert list(speculative["step"]["stage_ms"]) == ["draft", "verify", "draw", "accept_commit"]
    step = speculative["step"]
    ratio = step["ms"] / off["step"]["ms"]
    assert step["break_even_acceptance_length"] == pytest.approx(ratio)
    assert step["speedup_over_off"] == pytest.approx(step["acceptance_length"] / ratio)
    assert off["step"]["speedup_over_off"] is None
    assert off["step"]["speedup_at_expected_length"] is None
    dice = speculative["synthetic_acceptance"]
    assert dice["drawn_acceptance_length"] == speculative["mean_acceptance_length"]
    assert step["expected_acceptance_length"] == dice["expected_acceptance_length"]
    assert step["speedup_at_expected_length"] == pytest.approx((1 + 0.8 + 0.8 * 0.6) / ratio)
    assert speculative["identical"] is None
    assert speculative["synthetic_acceptance"]["expected_acceptance_length"] == pytest.approx(
        1 + 0.8 + 0.8 * 0.6
    )
    # the same weights: transformers says what the engine says
    for run in (plain, assisted):
        assert run["identical"] is True, run["differences"]
    assert report["settings"]["synthetic"] == pair
    assert report["settings"]["context"] == 20
    assert report["engine"]["models"][0]["memory"]["weights"] > 0
    assert any("transformers-compiled is left out" in note for note in report["notes"])
    assert any("real acceptance of random weights" in note for note in report["notes"])
    for word in ("× floor", "gap", "kernels", "draw", "copy bandwidth", "random weights"):
        assert word in result.stdout, word
    assert "speculative tree-2-1" in plot.read_text()


@pytest.mark.slow
def test_both_measures_draw_the_even_walk(pair):
    """Queued steps and rounds start where draws do: their lengths are those of its first steps."""
    tokens = 49
    report = report_of(
        "--synthetic", pair, "--context", 20, "--tokens", tokens, "--rounds", 1, "--warmup", 0,
        "--num-speculative-tokens", 3, "--synthetic-acceptance", "0.7",
    )  # fmt: skip
    run = report["runs"][1]
    draws = DrawnAcceptance(TokenTree.chain(3), (0.7,), 1, tokens, start=20)
    lengths = [draws.ends.length(q) for q in islice(draws.quantiles(0, draws.shift), tokens)]
    few = tokens // 4
    assert run["step"]["acceptance_length"] == pytest.approx(sum(lengths[:few]) / few)
    steps = next(k for k in range(tokens) if sum(lengths[:k]) >= tokens - 1)
    # none of them is decoded plainly for lack of positions
    assert run["num_steps"] == steps
    assert run["mean_acceptance_length"] == pytest.approx((tokens - 1) / steps)


@pytest.mark.slow
def test_real_acceptance_is_compared_with_off(pair):
    """Without dice outputs are the target's own; several plans, a batch."""
    report = report_of(
        "--synthetic", pair, *QUICK, "--tree", "2,1", "--tree", "1,1", "--batch-size", 2
    )  # fmt: skip
    off, tree, chain = report["runs"]
    assert [run["plan"] for run in report["runs"]] == ["off", "tree-2-1", "chain-2"]
    for run in (tree, chain):
        assert run["identical"] is True, run["differences"]
        assert run["synthetic_acceptance"] is None
        assert list(run["step"]["stage_ms"]) == ["draft", "verify", "accept_commit"]
        assert run["step"]["expected_acceptance_length"] is None
    assert off["num_output_tokens"] == 26


@pytest.mark.parametrize(
    ("chain", "acceptance", "plan"),
    [
        (None, None, "chain-4"),
        (None, [0.8], "chain-4"),
        (None, [0.72, 0.1, 0.04], "tree-3-1-1-1"),
        (5, [0.8], "chain-5"),
    ],
)
def test_plans_without_a_tree(chain, acceptance, plan):
    options = ShapesOptions(synthetic="T/D", num_speculative_tokens=chain)
    plans = choose_shape_plans(options, acceptance, has_draft=True)
    assert [item.name for item in plans] == [plan, "off"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--synthetic", "llama-9"), ("llama-9", "llama-3.1-8b", "qwen3-0.6b")),
        (("--synthetic", "llama-3.1-8b/qwen3-0.6b"), ("128256", "151936", "llama-3.2-1b")),
        (("--synthetic", "PAIR", "--context", 250), ("--context 250", "256 positions")),
        (("--synthetic", "PAIR", "--context", 0), ("--context 0", "1 or more")),
        (("--synthetic", "PAIR", "--dtype", "int8"), ("int8", "bfloat16")),
        (("--synthetic", "PAIR", "--batch-size", 0), ("--batch-size 0",)),
        (("--synthetic", "PAIR", "--tokens", 1), ("--tokens 1",)),
        (("--synthetic", "PAIR", "--tree", "x"), ("--tree x",)),
        (
            ("--synthetic", "PAIR", "--tree", "2,1", "--num-speculative-tokens", 2),
            ("both a tree", "one of them"),
        ),
        (
            ("--synthetic", "PAIR", "--tree", "2,1", "--synthetic-acceptance", ".7,.1,.1"),
            ("for 3 siblings", "tree-2-1 has 2", "--tree 3,1,1"),
        ),
        (
            (
                "--synthetic",
                "PAIR",
                "--num-speculative-tokens",
                3,
                "--synthetic-acceptance",
                ".7,.1",
            ),
            ("for 2 siblings", "chain-3 has 1"),
        ),
        (
            ("--synthetic", "target", "--synthetic-acceptance", ".7"),
            ("without a draft", "--synthetic target,DRAFT"),
        ),
        (
            ("--synthetic", "qwen3-8b", "--synthetic-acceptance", ".7"),
            ("without a draft", "--synthetic qwen3-8b/DRAFT"),
        ),
        (("--synthetic", "target", "--num-speculative-tokens", 2), ("without a draft",)),
        (("--synthetic", "PAIR", "--synthetic-acceptance", ".7,.6"), ("at most 1",)),
        (("--synthetic", "PAIR", "--plan", "off"), ("--plan", "--tree")),
        (("--synthetic", "PAIR", "--prompts", "p.jsonl"), ("--prompts with --synthetic",)),
        (("--synthetic", "PAIR", "--verify"), ("--verify with --synthetic",)),
        (("--synthetic", "PAIR", "--overlap"), ("--overlap with --synthetic",)),
        (("--synthetic", "PAIR", "--against", "vllm"), ("vllm", "transformers")),
        (
            ("--synthetic", "PAIR", "--against", "transformers", "--quantize", "int8"),
            ("--against transformers", "--quantize int8", "leave out --against transformers"),
        ),
        (("--synthetic", "PAIR", "--quantize", "int5"), ("--quantize int5",)),
        (("--synthetic", "PAIR", "--draft-quantize", "int5"), ("--draft-quantize int5",)),
        (("--synthetic", "PAIR", "--quantize-group", "64"), ("--quantize-group 64",)),
        (("target", "--synthetic", "PAIR"), ("both target and --synthetic", "one of them")),
        (("target", "--context", 5), ("--context with an engine",)),
        (("target", "--tree", "2,1"), ("--tree with an engine",)),
        (("target", "--dtype", "bfloat16"), ("--dtype with an engine",)),
        ((), ("no engine to measure", "specc bench ENGINE")),
        (("--context", 5), ("no engine to measure",)),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-").replace("/", ":")[:60],
)
def test_bad_input(pair, options, words):
    assert_refused(invoke(*(pair if o == "PAIR" else o for o in options)), *words)


def test_too_little_memory_is_found_before_weights_are_drawn(pair, monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("nothing may be allocated")

    monkeypatch.setattr(bench_device.RepeatingDevice, "free_bytes", lambda self: 1000)
    monkeypatch.setattr(bench_shapes_engine, "KVCache", refuse)
    monkeypatch.setattr(bench_device, "measure_copy_bandwidth", refuse)
    result = invoke("--synthetic", pair, *QUICK)
    assert_refused(result, "1000 bytes of memory free", "MiB", "--batch-size")


def test_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("--synthetic", "llama-3.1-8b", *QUICK)
    assert_refused(result, "no transformers", 'pip install "transformers')


def test_help_has_an_example():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "specc bench --synthetic llama-3.1-8b/llama-3.2-1b" in result.stdout


def test_a_self_draft_in_place_of_a_draft(pair, device):
    """Steps with a view, whose pass reads fewer bytes than the target's, and dice that accept."""
    options = ("--context", 60, "--tokens", 24, "--rounds", 1, "--warmup", 0)
    chain = ("--draft", "self:window=16,sink=2", "--num-speculative-tokens", 3)
    report = report_of("--synthetic", "target", *chain, *options, "--synthetic-acceptance", ".9")
    off, chained = report["runs"]
    assert chained["plan"] == "selfw16s2-chain-3"
    step = chained["step"]
    assert step["expected_acceptance_length"] == pytest.approx(1 + 0.9 + 0.81 + 0.729, abs=1e-3)
    assert step["acceptance_length"] == pytest.approx(step["expected_acceptance_length"], abs=0.5)
    assert {"draft", "verify"} <= set(step["stage_ms"])
    whole = off["step"]["bytes_parts"]["kv_cache"]
    # three passes of at most 16 + 2 + 3 rows, beside one of all that there are, 60 or more
    assert whole < step["bytes_parts"]["kv_cache"] < 2.1 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "layout"),
    [
        (("int8",), "int8"),
        pytest.param(("int4", "--quantize-group", 32), "int4-g32", marks=pytest.mark.slow),
        pytest.param(("fp8",), "fp8", marks=pytest.mark.slow),
    ],
)
def test_quantized_weights(pair, device, tmp_path, quantize, layout):
    """Target and draft: the layout and the bytes of its blocks are in the report."""
    options = ("--synthetic", pair, *QUICK, "--rounds", 1, "--tree", "2,1")
    dice, out = ("--synthetic-acceptance", "0.6,0.2"), tmp_path / "out.json"
    floats = report_of(*options, *dice)
    result = invoke(*options, *dice, "--quantize", *quantize, "--json", out)
    assert result.exit_code == 0, result.output
    report, dtype = json.loads(out.read_text()), floats["engine"]["dtype"]
    assert (floats["settings"]["quantize"], report["settings"]["quantize"]) == (None, layout)
    assert f"{dtype}, projections in {layout}" in " ".join(result.stdout.split())
    for model, plain in zip(report["engine"]["models"], floats["engine"]["models"], strict=True):
        assert (plain["quantization"], model["quantization"]) == (None, layout)
        assert set(plain["weight_bytes"]) == {dtype}
        # the head is in int8 in any case
        assert set(model["weight_bytes"]) == {dtype, "int8", layout}
        saved = sum(plain["weight_bytes"].values()) - sum(model["weight_bytes"].values())
        assert plain["memory"]["weights"] - model["memory"]["weights"] == saved > 0
    for run, of_floats in zip(report["runs"], floats["runs"], strict=True):
        assert run["step"]["is_captured"]
        parts, plain = run["step"]["bytes_parts"], of_floats["step"]["bytes_parts"]
        assert parts["kv_cache"] == pytest.approx(plain["kv_cache"])
        assert run["step"]["acceptance_length"] == of_floats["step"]["acceptance_length"]
        # all but the embedding, of which rows are read
        table = VOCAB * 64 * getattr(torch, dtype).itemsize
        # int8 with a scale for each row, where rows are looked up so
        looks_up = facts_of(report["engine"]["backend"]).looks_up_quantized
        tables = (VOCAB * (64 + 4) if looks_up else table, table)
        for item, found, own in zip((report, floats), (parts, plain), tables, strict=True):
            read = sum(item["engine"]["models"][0]["weight_bytes"].values()) - own
            # rotary frequencies
            assert read <= found["target_weights"] <= read + 4096
    # of the draft, in two passes that look rows up in its table
    saved -= tables[1] - tables[0]
    assert 0 < 2 * saved == plain["draft_weights"] - parts["draft_weights"]


@pytest.mark.parametrize(
    ("shapes", "draft", "words"),
    [
        ("target,draft", "self:window=16", "one shape and --draft self:window=W"),
        ("target", "draft", "one shape and --draft self:window=W"),
        ("target", "lookup:3", "one shape and --draft self:window=W"),
        ("target", "self:window=512", "at most 37 tokens"),
        ("target", "self:window=0", "self:window=0"),
    ],
)
def test_self_drafts_that_cannot_be(pair, shapes, draft, words):
    assert_refused(invoke("--synthetic", shapes, "--draft", draft, *QUICK), words)


def test_directories_keep_their_own_rotary_frequencies(tmp_path, monkeypatch):
    """A directory with a scaling that specc does not compile is refused as specc compile does."""
    fields = {"rope_type": "odd", "rope_theta": 1e4, "factor": 2.0}
    tiny_config("llama").save_pretrained(tmp_path / "odd")
    path = Path(tmp_path / "odd" / "config.json")
    config = json.loads(path.read_text()) | {"rope_parameters": fields}
    path.write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    assert_refused(invoke("--synthetic", tmp_path / "odd", *QUICK), "odd")
