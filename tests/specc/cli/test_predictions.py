"""Predictions on the command line: `specc run --prediction`, `specc bench --edits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specc.bench.edits import SHARES, edit_lines
from specc.config import CompileConfig
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests import engines
from tests.command_line import assert_refused, invoke
from tests.conftest import save_tiny_llama

COUNT = 60
GREEDY = ("--temperature", 0, "--max-tokens", COUNT, "--ignore-eos", "--json")
CODE = "".join(f"def name{i}(argument):\n    return argument + {i}\n" for i in range(20))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose steps off may be several in a row."""
    target = tmp_path_factory.mktemp("models") / "target"
    save_tiny_llama(target, seed=1, max_position_embeddings=512)
    plans = (OFF, SpecPlan.from_widths((1,) * 4, ("suffix",)))
    config = CompileConfig(plans=plans, max_seq_len=512, max_batch_size=2, backend="cpu")
    path = tmp_path_factory.mktemp("engines") / "suffix"
    return engines.build(target, (), path, config)


def outputs(*command: object, **options: object) -> list[dict]:
    result = invoke("run", *command, *GREEDY, **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["outputs"]


def test_a_file_is_what_the_output_may_be(engine: Path, tmp_path: Path) -> None:
    (plain,) = outputs(engine, "hello")
    # `suffix` finds some of it
    assert plain["metrics"]["num_steps"] > 0.75 * COUNT
    lines = tmp_path / "prompts.jsonl"
    ids = {"prompt": "hello", "prediction": plain["token_ids"]}
    lines.write_text("\n".join(map(json.dumps, ({"prompt": "hello"}, ids))), encoding="utf-8")
    none, found = outputs(engine, "--prompts", lines)
    assert found["token_ids"] == none["token_ids"] == plain["token_ids"]
    assert none["metrics"]["num_steps"] > found["metrics"]["num_steps"]
    # of a step of five, however many may follow each other unseen
    assert found["metrics"]["num_steps"] == -(-(COUNT - 1) // 5)
    assert found["metrics"]["accepted_prediction_tokens"] == COUNT


def test_steps_are_looked_at_while_a_prediction_may_go_on(engine: Path) -> None:
    """Steps in a row would have it wait: one that comes late begins as soon as it can."""
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    num_steps = []
    for milliseconds in (20, 0):
        with LLM(engine, multi_step_ms=milliseconds, shares_prefixes=False) as llm:
            want = llm.generate(["hello"], params)[0].outputs[0].token_ids
            found = llm.generate(["hello"], params, prediction=want[12:])[0]
        assert found.outputs[0].token_ids == want
        num_steps.append(found.metrics.num_steps)
    assert num_steps[0] == num_steps[1] < COUNT - 20


def test_text_and_what_is_told_of_it(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prediction.txt"
    (plain,) = outputs(engine, "hello")
    file.write_text(plain["text"], encoding="utf-8")
    command = ("run", engine, "hello", "--prediction", file, *GREEDY[:-1], "--stats")
    result = invoke(*command)
    assert result.exit_code == 0, result.stderr
    assert "of the prediction" in result.stderr


def test_what_is_refused(engine: Path, tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a", encoding="utf-8")
    assert_refused(invoke("run", tiny_engine, "a", "--prediction", file), "--draft suffix")
    assert_refused(invoke("run", engine, "a", "--prediction", tmp_path / "b"), "b")
    for option in (("--plan", "off"), ("--batch-size", 2), ("--against", "llama.cpp")):
        assert_refused(invoke("bench", engine, "--edits", file, *option), "--edits")
    assert_refused(invoke("bench", tiny_engine, "--edits", file), "--draft suffix")


@pytest.mark.parametrize("share", SHARES)
def test_lines_of_an_edit(share: float) -> None:
    """As many are changed as are to be, and the others are as they were."""
    lines = CODE.splitlines(keepends=True) * 5
    found = edit_lines(lines, share).splitlines(keepends=True)
    assert found == edit_lines(lines, share).splitlines(keepends=True)
    kept = [line for line in found if line in lines]
    changed = max(1, round(share * len(lines)))
    assert len(lines) - changed <= len(kept) <= len(lines)
    assert found != lines


def test_rows_of_edits(engine: Path, tmp_path: Path) -> None:
    file, report = tmp_path / "code.py", tmp_path / "out.json"
    file.write_text(CODE, encoding="utf-8")
    result = invoke(
        "bench", engine, "--edits", file, "--rounds", 1, "--warmup", 0, "--json", report
    )
    assert result.exit_code == 0, result.stderr
    for word in ("50%", "wrong", "suffix and prediction", "tokens a step"):
        assert word in result.stdout
    cases = {case["name"]: case for case in json.loads(report.read_text())["edits"]}
    assert list(cases) == ["1%", "10%", "50%", "wrong"]
    steps = {
        name: {run["name"]: run["tokens_per_step"] for run in case["runs"]}
        for name, case in cases.items()
    }
    for case in steps.values():
        assert case["off"] == 1
    assert steps["1%"]["prediction"] > steps["10%"]["prediction"] > steps["50%"]["prediction"]
    # of at most five, and one line of a few is changed
    assert steps["1%"]["prediction"] > 3
    assert steps["50%"]["prediction"] > 1.3
    assert steps["wrong"]["prediction"] < 1.1
    assert steps["10%"]["suffix and prediction"] >= steps["10%"]["suffix"]
