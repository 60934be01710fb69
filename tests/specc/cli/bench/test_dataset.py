"""`specc bench --dataset`: its report, its tables, and how every bad input ends."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest

from specc.bench import step_bytes as bench_bytes
from specc.bench.conversations import ConversationContender
from tests import command_line
from tests.command_line import assert_refused

invoke = partial(command_line.invoke, "bench")
QUICK = ("--tokens", 8, "--rounds", 2, "--warmup", 0, "--no-verify")
QUESTIONS = [
    {"question_id": 1, "category": "coding", "turns": ["def f(x):", "and g"]},
    {"question_id": 2, "category": "rag", "turns": ["hello"]},
    {"question_id": 3, "category": "rag", "turns": ["xyz", "w" * 90]},
    {"question_id": 4, "category": "rag", "turns": ["more"]},
    # nothing of it fits
    {"question_id": 5, "category": "long", "turns": ["w" * 90]},
]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    measure = bench_bytes.measure_read_bandwidth
    monkeypatch.setattr(bench_bytes, "measure_read_bandwidth", lambda: measure(1_000_000))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


def test_the_report_and_its_tables(tiny_engine, file, tmp_path):
    out = tmp_path / "out.json"
    result = invoke(tiny_engine, *QUICK, "--dataset", file, "--json", out)
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text())
    assert report["settings"]["dataset"] == str(file)
    assert report["settings"]["num_prompts"] == 5
    off, speculative = report["runs"]
    for run in (off, speculative):
        assert run["identical"] is True, run["differences"]
        assert run["identical_prompts"] == 4
        assert list(run["categories"]) == ["coding", "rag", "long"]
        coding, rag, long = run["categories"].values()
        assert (coding["num_questions"], coding["num_turns"], coding["num_left_out"]) == (1, 2, 0)
        assert (rag["num_questions"], rag["num_turns"], rag["num_left_out"]) == (3, 3, 1)
        assert (long["num_turns"], long["num_left_out"], long["num_output_tokens"]) == (0, 1, 0)
        # a speed of 0 would be taken into means
        measured = ("tokens_per_s", "speedup_over_off", "mean_acceptance_length")
        assert [long[name] for name in measured] == [None] * 3
        assert run["num_output_tokens"] == coding["num_output_tokens"] + rag["num_output_tokens"]
    assert off["categories"]["rag"]["speedup_over_off"] is None
    assert off["categories"]["rag"]["mean_acceptance_length"] == 1.0
    assert speculative["categories"]["rag"]["speedup_over_off"]["median"] > 0
    assert speculative["categories"]["rag"]["mean_acceptance_length"] >= 1.0
    assert "2 of 7 turns were left out" in result.stdout
    assert "no chat template" in result.stdout
    assert "5 questions with prompts of" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    for name in ("coding", "rag", "all"):
        assert [row for row in rows if row[:2] == [name, "off"]]
        assert [row for row in rows if row[:3] == [name, "speculative", "tree-2-1"]]
    assert ["rag", "off", "3", "of", "4"] in [row[:5] for row in rows]


@pytest.mark.slow
def test_a_template_of_the_engine_and_few_questions(tiny_engine, file, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    (engine / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    options = ("--dataset", file, "--num-prompts", 1, "--batch-size", 2, "--json", "-")
    result = invoke(engine, *QUICK, *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert "chat template" not in str(report["notes"])
    assert [c["num_questions"] for c in report["runs"][0]["categories"].values()] == [1, 1, 1]
    # "<user>def f(x):", "<user>hello", and the second turn after the first and its answer
    first = [len("<user>def f(x):"), len("<user>hello")]
    assert report["settings"]["num_prompt_tokens"] > sum(first) + first[0]


@pytest.mark.slow
def test_a_mismatch_names_question_and_turn(tiny_engine, file, monkeypatch):
    run = ConversationContender.run

    def wrong(self):
        found = run(self)
        if self.name == "speculative":
            found.outputs[1][2] = (found.outputs[1][2] + 1) % 260
        return found

    monkeypatch.setattr(ConversationContender, "run", wrong)
    result = invoke(tiny_engine, *QUICK, "--rounds", 1, "--dataset", file)
    assert "3 of 4" in result.stdout
    assert "question 1, turn 2, differs from token 2 on" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompts", "p.jsonl"), ("--prompts p.jsonl", "leave out --prompts")),
        (("--against", "transformers"), ("--against transformers",)),
        (("--synthetic-acceptance", "0.5"), ("--synthetic-acceptance 0.5",)),
        (("--tokens", 95), ("none of whose questions", "lower --tokens")),
    ],
)
def test_what_does_not_go_together(tiny_engine, file, options, words):
    assert_refused(invoke(tiny_engine, *QUICK, "--dataset", file, *options), *words)


def test_a_malformed_line_ends_it_before_the_engine_is_loaded(file):
    file.write_text('{"question_id": 1}\n')
    assert_refused(invoke("no-engine", "--dataset", file), "question.jsonl, line 1: no category")
    assert_refused(invoke("--synthetic", "llama-3.2-1b", "--dataset", file), "--dataset with")
