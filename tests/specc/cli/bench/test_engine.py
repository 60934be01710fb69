"""`specc bench`: reports, tables, pictures, and how every bad input ends."""

from __future__ import annotations

import json
import sys
from functools import partial
from xml.etree import ElementTree

import pytest

from specc.bench import step_bytes as bench_bytes
from specc.bench.engine import EngineContender
from specc.system.machine import num_usable_cores
from tests import command_line
from tests.command_line import assert_refused
from tests.specc.bench.peers import fake_peer

invoke = partial(command_line.invoke, "bench")

RUN_FIELDS = {
    "name": str,
    "plan": (str, type(None)),
    "widths": (list, type(None)),
    "synthetic_acceptance": (dict, type(None)),
    "tokens_per_s": float,
    "tokens_per_s_min": float,
    "tokens_per_s_max": float,
    "tokens_per_s_rounds": list,
    "decode_tokens_per_s": float,
    "speedup_over_off": (dict, type(None)),
    "time_to_first_token_ms": float,
    "ms_per_step": float,
    "ms_per_step_min": float,
    "ms_per_step_max": float,
    "stage_ms_per_step": dict,
    "sequences_per_step": float,
    "mean_acceptance_length": float,
    "accepted_per_depth": list,
    "break_even_acceptance_length": (float, type(None)),
    "num_output_tokens": int,
    "num_steps": int,
    "elapsed_s": float,
    "excluded_s": float,
    "identical": (bool, type(None)),
    "identical_prompts": (int, type(None)),
    "identical_share": (float, type(None)),
    "equal_token_share": (float, type(None)),
    "differences": list,
    "categories": dict,
    "bytes_per_step": (int, type(None)),
    "bytes_per_step_parts": (dict, type(None)),
    "read_bandwidth_share": (float, type(None)),
}
REPORT_FIELDS = [
    "schema_version",
    "command",
    "date",
    "machine",
    "versions",
    "engine",
    "settings",
    "read_bandwidth_gb_s",
    "read_bandwidth",
    "runs",
    "not_available",
    "notes",
]
QUICK = ("--tokens", 12, "--rounds", 2, "--warmup", 0, "--no-verify")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    measure = bench_bytes.measure_read_bandwidth
    monkeypatch.setattr(bench_bytes, "measure_read_bandwidth", lambda: measure(1_000_000))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "hello", "xyz")))
    return path


def report_of(*args: object) -> dict:
    result = invoke(*args, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_help_has_examples():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Examples:\n    specc bench" in result.stdout


@pytest.mark.slow
def test_against_transformers(tiny_engine, prompts, tmp_path):
    """The whole report, its table, its picture."""
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    options = ("--against", "transformers", "--prompts", prompts, "--plan", "chain-3")
    result = invoke(tiny_engine, *QUICK, *options, "--rounds", 1, "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "rounds … " in result.stderr
    report = json.loads(out.read_text())
    assert list(report) == REPORT_FIELDS
    names = ["off", "speculative", "transformers", "transformers-assisted", "transformers-lookup"]
    assert report["not_available"] == []
    assert [run["name"] for run in report["runs"]] == names
    for run in report["runs"]:
        assert set(run) == set(RUN_FIELDS)
        for key, kind in RUN_FIELDS.items():
            assert isinstance(run[key], kind), (run["name"], key, run[key])
        assert run["identical"] is True, run["differences"]
        assert run["num_output_tokens"] == 3 * 12
        assert len(run["tokens_per_s_rounds"]) == 1
        assert run["tokens_per_s_min"] <= run["tokens_per_s"] <= run["tokens_per_s_max"]
        assert run["name"] in result.stdout
    off, speculative, plain, assisted, _ = report["runs"]
    assert off["mean_acceptance_length"] == plain["mean_acceptance_length"] == 1.0
    assert speculative["break_even_acceptance_length"] == pytest.approx(
        speculative["ms_per_step"] / off["ms_per_step"]
    )
    assert assisted["break_even_acceptance_length"] == pytest.approx(
        assisted["ms_per_step"] / plain["ms_per_step"]
    )
    gb_s = off["bytes_per_step"] / 1e6 / off["ms_per_step"]
    assert off["read_bandwidth_share"] == pytest.approx(gb_s / report["read_bandwidth_gb_s"])
    stages = speculative["stage_ms_per_step"]
    assert set(stages) == {"draft", "verify", "accept_commit", "host"}
    settings = report["settings"]
    assert (settings["num_prompts"], settings["num_prompt_tokens"]) == (3, 10)
    assert settings["threads"] >= 1
    assert set(report["versions"]) == {"python", "torch", "specc", "transformers"}
    assert report["machine"]["usable_cores"] == num_usable_cores()
    assert report["engine"]["default_plan"] == "tree-2-1"
    assert "fastest setting" in result.stdout
    picture = ElementTree.parse(plot).getroot()
    assert picture.tag.endswith("svg")
    text = "".join(picture.itertext())
    assert "transformers-assisted" in text
    assert "speculative chain-3" in text


@pytest.fixture
def fake(monkeypatch, tmp_path) -> str:
    fake_peer.register(monkeypatch, tmp_path / "cache")
    return fake_peer.NAME


def test_batches(tiny_engine, prompts, fake):
    """With a peer whose answers are others: what it does, cannot do, and how far it is equal."""
    options = ("--against", fake, "--prompts", prompts, "--batch-size", 2)
    out, plot = prompts.with_name("out.json"), prompts.with_name("out.svg")
    result = invoke(tiny_engine, *QUICK, *options, "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text())
    assert list(report) == REPORT_FIELDS
    names = ["off", "speculative", "fake", "fake-assisted"]
    assert [run["name"] for run in report["runs"]] == names
    off, speculative, plain, assisted = report["runs"]
    # two sequences take 11 steps together, the third alone
    assert (off["num_steps"], off["sequences_per_step"]) == (22, 1.5)
    for run in (off, speculative):
        assert (run["identical"], run["equal_token_share"]) == (True, 1.0), run["differences"]
    for run in (plain, assisted):
        assert set(run) == set(RUN_FIELDS)
        assert (run["identical"], len(run["differences"])) == (False, 3)
        firsts = [item["position"] for item in run["differences"]]
        assert run["equal_token_share"] == sum(firsts) / 36
    assert assisted["break_even_acceptance_length"] == pytest.approx(
        assisted["ms_per_step"] / plain["ms_per_step"]
    )
    assert report["not_available"] == [{"name": "fake-lookup", "reason": "it has no lookups"}]
    settings = report["settings"]
    assert settings["against"] == [fake]
    # the default plan drafts 2 deep
    assert settings["peers"]["fake-assisted"] == {"name": "fast", "model_bytes": 0, "num": 3}
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["fake-lookup", "not", "available"] in rows
    assert "fake-lookup is not available: it has no lookups" in result.stdout
    text = " ".join(ElementTree.parse(plot).getroot().itertext())
    assert "fake-lookup" in text
    assert "not available" in text


def test_a_peer_that_is_not_installed(tmp_path, monkeypatch):
    """Said before the engine is looked at, and so before anything is measured."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = invoke(tmp_path / "no engine", "--against", "llama.cpp")
    assert_refused(result, "--against llama.cpp", "llama-cpp-python", "pip install")


@pytest.mark.slow
def test_several_plans(tiny_engine, prompts):
    plans = ("--plan", "chain-3", "--plan", "tree-2-1", "--plan", "off", "--plan", "chain-3")
    report = report_of(tiny_engine, *QUICK, *plans, "--prompts", prompts, "--num-prompts", 1)
    found = [(run["name"], run["plan"]) for run in report["runs"]]
    for run in report["runs"]:
        assert len(run["tokens_per_s_rounds"]) == 2
    assert found == [("off", "off"), ("speculative", "chain-3"), ("speculative", "tree-2-1")]
    assert report["settings"]["num_prompts"] == 1


@pytest.mark.slow
def test_synthetic_acceptance(tiny_engine):
    """Built-in prompts; the tree's only children are accepted."""
    result = invoke(tiny_engine, *QUICK, "--synthetic-acceptance", "0,1")
    assert result.exit_code == 0, result.stderr
    assert "synthetic" in result.stdout
    report = report_of(tiny_engine, *QUICK, "--synthetic-acceptance", "0,1")
    off, speculative = report["runs"]
    assert (off["identical"], off["synthetic_acceptance"]) == (True, None)
    assert speculative["identical"] is None
    assert speculative["synthetic_acceptance"] == {
        "probabilities": [0.0, 1.0],
        # the second child of the root, which has one child: that is of the first rank
        "expected_acceptance_length": 2.0,
    }
    # 12 tokens: one of the prompt's pass, five steps of two, one of a last step that is cut
    assert speculative["num_steps"] == 6 * report["settings"]["num_prompts"]
    assert report["settings"]["prompts"] == "built-in"


@pytest.mark.slow
def test_a_mismatch_is_not_hidden(tiny_engine, prompts, monkeypatch):
    """A wrong token in one round of one prompt: report and table say so."""
    run = EngineContender.run

    def wrong(self):
        found = run(self)
        if self.name == "speculative":
            found.outputs[1][4] = (found.outputs[1][4] + 1) % 260
        return found

    monkeypatch.setattr(EngineContender, "run", wrong)
    options = (tiny_engine, *QUICK, "--prompts", prompts)
    off, speculative = report_of(*options)["runs"]
    assert off["identical"] is True
    assert (speculative["identical"], speculative["identical_prompts"]) == (False, 2)
    (difference,) = speculative["differences"]
    assert (difference["prompt"], difference["position"]) == (1, 4)
    assert difference["found"] == (difference["expected"] + 1) % 260
    assert difference["margin"] > 0
    result = invoke(*options)
    assert "2 of 3" in result.stdout
    assert "prompt 1 differs from token 4 on" in result.stdout


@pytest.mark.slow
def test_uneven_rounds_are_pointed_out(tiny_engine, prompts, monkeypatch):
    """The second run of each takes twice as long, as on a machine with other work."""
    run, calls = EngineContender.run, {"off": 0, "speculative": 0}

    def uneven(self):
        found = run(self)
        calls[self.name] += 1
        found.elapsed_s = float(calls[self.name])
        return found

    monkeypatch.setattr(EngineContender, "run", uneven)
    report = report_of(tiny_engine, *QUICK, "--prompts", prompts)
    (note,) = report["notes"]
    assert "off by 100%, speculative tree-2-1 by 100%" in note


@pytest.mark.parametrize("threads", [0, -1, num_usable_cores() + 1])
def test_threads_out_of_range(tiny_engine, threads):
    result = invoke(tiny_engine, "--threads", threads)
    assert_refused(result, f"--threads {threads}", f"1 … {num_usable_cores()}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--synthetic-acceptance", "0.7,0.6"), ("0.7,0.6", "at most 1")),
        (("--synthetic-acceptance", "x"), ("numbers",)),
        (("--synthetic-acceptance", "0.5", "--plan", "off"), ("a plan that drafts",)),
        (("--batch-size", 0), ("--batch-size 0",)),
        (("--batch-size", 5), ("5", "max_batch_size")),
        (("--rounds", 0), ("--rounds 0",)),
        (("--warmup", -1), ("--warmup -1",)),
        (("--tokens", 1), ("--tokens 1",)),
        (("--num-prompts", 0), ("--num-prompts 0",)),
        (("--tokens", 90), ("max_seq_len", "--tokens")),
        (("--plan", "chain-9"), ("chain-9", "tree-2-1")),
        (("--against", "vllm"), ("vllm", "transformers", "llama.cpp")),
        (("--json", "/no/such/directory/out.json"), ("/no/such/directory",)),
        (("--plot", "/no/such/directory/out.svg"), ("/no/such/directory",)),
        (("--plot", "out.png"), ("out.png", ".svg")),
        (("--prompts", "/no/such/prompts.jsonl"), ("/no/such/prompts.jsonl",)),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-").replace("/", ":"),
)
def test_bad_options(tiny_engine, options, words):
    assert_refused(invoke(tiny_engine, *options), *words)


def test_no_engine(tmp_path):
    assert_refused(invoke(tmp_path))


def test_checkpoint_is_gone(tiny_engine, tmp_path):
    options = ("--against", "transformers", "--target-checkpoint", tmp_path / "no")
    assert_refused(invoke(tiny_engine, *QUICK, *options), str(tmp_path / "no"), "--target-checkpo")


def test_no_matplotlib(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke(tiny_engine, "--plot", tmp_path / "out.svg")
    assert_refused(result, "matplotlib", "pip install")


def test_output_is_a_directory(tiny_engine, tmp_path):
    assert_refused(invoke(tiny_engine, "--json", tmp_path), str(tmp_path))
