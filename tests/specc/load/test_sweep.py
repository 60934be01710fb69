"""Sweeps over rates and policies, reports and pictures, and `specc bench serve` as a whole."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from specc.cost.latency_table import LatencyTable, PassSeconds
from specc.draw.charts import draw_load, is_wide, lines_of
from specc.errors import RequestError
from specc.load.arrivals import Arrivals
from specc.load.decisions import DecisionTrace
from specc.load.lengths import LengthDistribution
from specc.load.report import LoadBench, make_load_report
from specc.load.request import Workload
from specc.load.result import LoadRun, RequestResult
from specc.load.simulated import SimulatedSubject, plans_of
from specc.load.sweep import Sweep, run_sweep
from specc.simulate.comparison import compare
from specc.simulate.load import Drafting, Load, SimulatedRequest
from specc.simulate.simulator import Limits
from specc.system.extras import install_command
from tests import command_line
from tests.specc.draw.read_svg import Svg
from tests.specc.server.serving import serve

invoke = partial(command_line.invoke, "bench", "serve")

# a pass takes 10 ms and a little for each token; a draft's, a twentieth
TABLE = LatencyTable(
    PassSeconds({1: 0.010, 64: 0.020, 1024: 0.3}, {1: 1e-6}, "target"),
    {"draft_0": PassSeconds({1: 0.0005, 64: 0.001, 1024: 0.01}, {1: 0.0}, "draft_0")},
)
ACCEPTANCE = [[0.8, 0.1]]


def workload(count: int = 12) -> Workload:
    return Workload(
        count, LengthDistribution.parse("uniform:8-24", ""), LengthDistribution.parse("20", "")
    )


class Recorder:
    """Serves nothing: latencies follow from policy, rate and round."""

    def __init__(self) -> None:
        self.seconds = {"off": 2.0, "fast": 1.0}
        self.calls: list[tuple[str, tuple[float, ...]]] = []
        self.checked: list[str] = []

    def check(self, policies) -> None:
        self.checked = list(policies)

    def run(self, policy, requests, progress, trace) -> LoadRun:
        self.calls.append((policy, tuple(request.arrival_s for request in requests)))
        latency = self.seconds[policy] * (1 + len(self.calls) % 3)
        results = [
            RequestResult(r.index, r.arrival_s, r.arrival_s, r.arrival_s + latency, first_s=9e9)
            for r in requests
        ]
        for done in range(len(requests)):
            progress(done + 1, len(requests))
        return LoadRun(results, 10.0)


def test_every_round_serves_all_policies_in_turn_with_the_same_requests():
    sweep = Sweep([Arrivals(1.0), Arrivals(4.0)], ["off", "fast"], workload(), rounds=2)
    subject, seen = Recorder(), []
    result = run_sweep(sweep, subject, lambda done, total, what="": seen.append((done, total)))
    assert subject.checked == ["off", "fast"]
    names = [policy for policy, _ in subject.calls]
    # the order rotates from round to round
    assert names == ["off", "fast"] * 2 + ["fast", "off"] * 2
    arrivals = [times for _, times in subject.calls]
    for first, second in zip(arrivals[::2], arrivals[1::2], strict=True):
        assert first == second
    assert len(set(arrivals)) == 4
    assert seen[0] == (0, 8 * 12)
    assert seen[-1] == (8 * 12, 8 * 12)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert set(result.runs) == set(sweep.run_keys())


def test_ratios_are_taken_within_a_round():
    sweep = Sweep([Arrivals(1.0)], ["off", "fast"], workload(), rounds=3)
    cells = run_sweep(sweep, Recorder()).to_json({})
    off, fast = cells
    # calls 1 … 6: off 2·2, fast 1·3 | fast 1·1, off 2·2 | off 2·3, fast 1·1
    assert off["mean_e2el_ms"] == pytest.approx({"median": 4000, "min": 4000, "max": 6000})
    assert fast["mean_e2el_ms"] == pytest.approx({"median": 1000, "min": 1000, "max": 3000})
    assert fast["latency_over_off"] == pytest.approx({"median": 1 / 4, "min": 1 / 6, "max": 3 / 4})
    assert off["latency_over_off"] is None
    assert [figures["completed"] for figures in fast["rounds"]] == [12, 12, 12]


def test_a_simulation_is_that_of_the_simulator():
    """The same requests, given to the simulator directly, and by way of a load."""
    plans = plans_of(["off", "chain-2", "goodput"])
    limits = Limits(max_num_seqs=8, max_seq_len=128)
    requests = workload(30).requests(Arrivals(20.0))
    subject = SimulatedSubject(TABLE, plans, limits, ACCEPTANCE, seed=3)
    drafting = Drafting({"draft_0": ACCEPTANCE})
    direct = Load(
        [
            SimulatedRequest(r.arrival_s, 20, r.num_output_tokens, drafting, load_share=i / 29)
            for i, r in enumerate(requests)
        ],
        3,
    )
    wanted = compare({"one": direct}, TABLE, plans, limits)[0].reports
    for policy in ("off", "chain-2", "goodput"):
        run = subject.run(policy, requests, lambda done, total: None, None)
        mean = sum(one.latency_s for one in run.results) / len(requests)
        assert mean == pytest.approx(wanted[policy]["mean_latency_s"], rel=1e-6)
        ttft = sum(one.ttft_s for one in run.results) / len(requests)
        assert ttft == pytest.approx(wanted[policy]["mean_ttft_s"], rel=1e-6)
        tpot = [one.tpot_s for one in run.results]
        assert sum(tpot) / len(tpot) == pytest.approx(wanted[policy]["mean_tpot_s"], rel=1e-6)
        assert run.duration_s == pytest.approx(wanted[policy]["end_s"])
        assert run.plan_shares == pytest.approx(wanted[policy]["plan_shares"], rel=1e-6)
        assert run.is_virtual


def test_a_simulated_trace_adds_up():
    plans = plans_of(["chain-2"])
    # prompts are rare: what they take is not in the prediction
    length = LengthDistribution.parse("80", "")
    requests = Workload(12, length, LengthDistribution.parse("20", "")).requests(Arrivals(3.0))
    lines: list[dict] = []
    trace = DecisionTrace(lines.append, {"policy": "goodput"})
    subject = SimulatedSubject(TABLE, plans, Limits(max_num_seqs=8, max_seq_len=128), ACCEPTANCE)
    run = subject.run("goodput", requests, lambda done, total: None, trace)
    trace.end()
    trace.end()
    # all tokens but the first ones of prompts that nobody decoded beside
    total = sum(request.num_output_tokens for request in requests)
    assert total - len(requests) <= sum(line["tokens"] for line in lines) < total
    assert sum(line["iterations"] for line in lines) <= 2000
    times = [line["time_s"] for line in lines]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < run.duration_s
    for line in lines:
        assert line["observed_s"] is not None or line["observed_with_prompts_s"] is not None
        assert set(line["plans"]) <= set(plans)
    # the policy knows the table, and the simulation keeps to it
    ratios = [line["observed_s"] / line["predicted_s"] for line in lines if line["observed_s"]]
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("drift", "is_told"), [(1.3, True), (0.8, True), (1.05, False)])
def test_a_machine_that_has_changed_is_told(drift, is_told):
    sweep = Sweep([Arrivals(1.0)], ["off"], workload())
    bench = LoadBench("x", run_sweep(sweep, Recorder()), {}, drift=drift)
    notes = make_load_report(bench, "specc")["notes"]
    assert any("says nothing" in note for note in notes) == is_told


def test_plans_without_an_engine_are_told_by_their_names():
    plans = plans_of(["chain-3", "tree-3-2-1", "goodput", "adaptive"])
    assert list(plans) == ["off", "chain-3", "tree-3-2-1"]
    assert (plans["chain-3"].num_nodes, plans["tree-3-2-1"].num_nodes) == (4, 16)
    for name in ("best", "chain-", "chain-1-1", "tree", "tree-0", "dynamic-16-4-4"):
        with pytest.raises(RequestError, match="without an engine"):
            plans_of([name])


def test_lines_of_a_picture_skip_what_has_no_place():
    spread = {"median": 1.0, "min": 1.0, "max": 1.0}
    cells = [
        {"request_rate": 4.0, "policy": "off", "mean_e2el_ms": spread},
        {"request_rate": 1.0, "policy": "off", "mean_e2el_ms": spread},
        {"request_rate": None, "policy": "off", "mean_e2el_ms": spread},
        {"request_rate": 1.0, "policy": "goodput", "mean_e2el_ms": None},
    ]
    assert {name: [x for x, _ in points] for name, points in lines_of(cells).items()} == {
        "off": [1.0, 4.0]
    }


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE.to_json()))
    return path


def test_the_command_simulates_a_sweep(table, tmp_path):
    arguments = [
        "--simulate", table, "--acceptance", "0.8,0.1", "--prompt-tokens", "20",
        "--output-tokens", "uniform:8-24", "--num-requests", 12, "--request-rate", "2,40,inf",
        "--policies", "off,chain-2,goodput", "--rounds", 2, "--max-num-seqs", 8,
        "--goodput", "ttft:100 tpot:20",
        "--trace", tmp_path / "t.jsonl", "--details", tmp_path / "d.jsonl",
        "--plot", tmp_path / "p.svg",
    ]  # fmt: skip
    done = invoke(*arguments, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    assert "simulated seconds" in done.stdout
    assert "chain-2" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    keys = [(cell["request_rate"], cell["policy"]) for cell in report["cells"]]
    assert keys == [(r, p) for r in (2, 40, None) for p in ("off", "chain-2", "goodput")]
    assert report["is_virtual"]
    assert report["settings"]["burstiness"] == 1.0
    assert report["latency_table"] == TABLE.to_json()
    assert report["acceptance"] == [[0.8, 0.1]]
    assert report["objectives_ms"] == {"ttft": 100, "tpot": 20}
    assert report["machine"]["cores"] > 0
    assert "before" in report["load_average"]
    assert len(report["cells"][0]["rounds"]) == 2
    decisions = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {line["policy"] for line in decisions} == {"goodput"}
    assert {line["request_rate"] for line in decisions} == {2, 40, None}
    assert {line["round"] for line in decisions} == {0, 1}
    details = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert len(details) == 3 * 3 * 2 * 12
    picture = Svg(tmp_path / "p.svg")
    assert {"line-off", "line-chain-2", "line-goodput"} <= set(picture.groups)
    # seconds are simulated: the same again, to the last bit
    again = invoke(*arguments, "--json", "-")
    assert json.loads(again.stdout)["cells"] == report["cells"]


def test_the_command_verifies_adaptively(table, tmp_path):
    """Goodput leaves out what a long chain seldom accepts; others serve as without the option."""
    arguments = [
        "--simulate", table, "--acceptance", "0.9/0.5/0.1", "--prompt-tokens", "20",
        "--output-tokens", 60, "--num-requests", 16, "--policies", "off,chain-6,goodput",
        "--max-num-seqs", 16, "--json", "-",
    ]  # fmt: skip
    reports = []
    for option in ([], ["--adaptive-verification"]):
        done = invoke(*arguments, *option)
        assert done.exit_code == 0, done.output
        reports.append(json.loads(done.stdout))
        assert reports[-1]["settings"]["adapts_verification"] is bool(option)
    plain, adapting = ({cell["policy"]: cell for cell in r["cells"]} for r in reports)
    assert adapting["off"] == plain["off"]
    assert adapting["chain-6"] == plain["chain-6"]
    rounds = [cells["goodput"]["rounds"][0] for cells in (plain, adapting)]
    # six levels but at a request's end, and beginnings of chains
    levels = [r["spec_decode_draft_tokens"] / r["spec_decode_num_drafts"] for r in rounds]
    assert levels[0] > 5.5
    assert levels[1] < 3
    assert rounds[1]["mean_e2el_ms"] < rounds[0]["mean_e2el_ms"]


@pytest.mark.slow
def test_the_command_serves_an_engine(tiny_engine, tmp_path):
    done = invoke(
        tiny_engine, "--request-rate", 100, "--num-requests", 6, "--output-tokens", 8,
        "--policies", "off,chain-3,goodput", "--warmup", 1, "--no-verify",
        "--prompt-tokens", "uniform:3-9", "--measure-table", tmp_path / "table.json",
        "--compare-simulation", "--trace", tmp_path / "t.jsonl", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "chain-3 at 100/s: simulated mean latency" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert [cell["policy"] for cell in report["cells"]] == ["off", "chain-3", "goodput"]
    for cell in report["cells"]:
        figures = cell["rounds"][0]
        assert (figures["completed"], figures["failed"]) == (6, 0)
        assert figures["total_output_tokens"] == 48
        assert cell["simulated"]["over_measured"]["median"] > 0
    measured = LatencyTable.from_json(json.loads((tmp_path / "table.json").read_text()))
    assert measured.to_json() == report["latency_table"]
    assert set(measured.drafts) == {"draft_0"}
    assert report["latency_drift"] > 0
    # the dice are those of the run that drafted
    rate = report["cells"][1]["rounds"][0]["spec_decode_per_position_acceptance_rates"][0]
    assert report["acceptance"][0][0] == pytest.approx(rate)
    assert report["engine"]["plans"] == ["tree-2-1", "chain-3", "off"]
    assert (tmp_path / "t.jsonl").read_text().count("\n") > 0


@pytest.mark.slow
def test_the_command_asks_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serve(api_keys=("secret",)) as server:
        done = invoke(
            "--base-url", server.base, "--num-requests", 4, "--output-tokens", 8,
            "--prompts", _prompts(tmp_path), "--json", tmp_path / "r.json", "--warmup", 1,
        )  # fmt: skip
        server.wait_until_idle()
    assert done.exit_code == 0, done.output
    assert "Successful requests:                    4" in done.stdout
    assert "Acceptance length" in done.stdout
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text)["subject"] == server.base
    assert "secret" not in text


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client"])
def test_a_server_without_the_extra_of_the_client(package, monkeypatch):
    for name in ("specc.load.http_client", "specc.load.http_client", f"{package}.parser"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    done = invoke("--base-url", "http://localhost:1", "--num-requests", 4)
    assert done.exit_code == 2, done.output
    found, _, do = done.stderr.strip().split("\n")[-3:]
    assert package in found
    assert install_command("bench") in do


def _prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n{"prompt": "abc"}\n')
    return path


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "nothing to measure"),
        (["--base-url", "x", "--simulate", "t"], "--base-url and --simulate"),
        (["--base-url", "localhost"], "--base-url localhost"),
        (["--base-url", "http://localhost:1", "--backend", "eager"], "--backend"),
        (["--simulate", "t", "--overlap"], "--overlap"),
        (["--base-url", "http://localhost:1", "--adaptive-verification"], "--adaptive-verif"),
        (["--simulate", "t", "--acceptance", ".8"], "counts the prompts' tokens"),
        (["--simulate", "t"], "without --acceptance"),
        (["engine", "--acceptance", ".8"], "--acceptance"),
        (["engine", "--compare-simulation"], "without a latency table"),
        (["engine", "--table", "a", "--measure-table", "b"], "--table and --measure-table"),
        (["engine", "--model", "m"], "--model"),
        (["engine", "--goodput", "speed:3"], "--goodput speed:3"),
        (["engine", "--request-rate", "0"], "a request rate of 0"),
        (["engine", "--on-off", "3"], "--on-off 3"),
        (["engine", "--warmup", "-1"], "--warmup -1"),
        (["engine", "--plot", "p.png"], "--plot p.png"),
        (["nowhere"], "nowhere"),
    ],
)
def test_what_goes_wrong_is_told_in_three_lines(arguments, found):
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().split("\n")[-3:]
    assert [line.split(":")[0] for line in lines] == ["found", "needed", "do"], done.stderr
    assert found in lines[0]


def test_a_simulation_without_goodput_verifies_whole_trees(table):
    done = invoke(
        "--simulate", table, "--acceptance", ".8", "--prompt-tokens", 4, "--policies",
        "off,chain-2", "--adaptive-verification",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "--adaptive-verification, and the policies off, chain-2" in done.stderr


def test_tables_that_are_none(tmp_path):
    for text, found in (("{", "no JSON"), ("{}", "schema None"), (None, "cannot be read")):
        path = tmp_path / "t.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        done = invoke("--simulate", path, "--acceptance", ".8", "--prompt-tokens", 4)
        assert done.exit_code == 2
        assert found in done.stderr


def test_bench_alone_still_takes_an_engine():
    """`bench serve` is a command of its own, `bench` another one."""
    done = command_line.invoke("bench", "--help")
    assert "--against" in done.stdout
    assert "--request-rate" in invoke("--help").stdout
    done = command_line.invoke("bench", "nowhere/serve")
    assert done.exit_code == 2
    assert "nowhere/serve" in done.stderr


@pytest.mark.parametrize(("most", "is_log"), [(2.9, False), (31.0, True)])
def test_the_axis_begins_at_zero_unless_latencies_are_far_apart(tmp_path, most, is_log):
    spreads = [dict.fromkeys(("median", "min", "max"), 1000 * s) for s in (1.0, most)]
    cells = [
        {"request_rate": rate, "policy": "off", "mean_e2el_ms": spread}
        for rate, spread in enumerate(spreads, start=1)
    ]
    assert is_wide(lines_of(cells)) is is_log
    settings = {"num_requests": 2, "prompt_tokens": None, "output_tokens": "8"}
    out = tmp_path / "plot.svg"
    draw_load({"cells": cells, "is_virtual": True, "settings": settings}, out)
    text = out.read_text()
    assert ("(logarithmic)" in text) is is_log
    # tick labels of both axes
    assert len(re.findall(r">0(?:\.0+)?<", text)) == (1 if is_log else 2)
