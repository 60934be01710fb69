"""`specc bench --dataset`: conversations of published data sets, by category.

Their files are as users have them: Spec-Bench and SPEED-Bench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.bench.questions import Question
from specc.cli.bench.engine import plans_beside_off
from specc.cli.bench.report import command_line, put_out
from specc.cli.progress import make_listener
from specc.cli.prompts import decode, read_bytes
from specc.errors import InputFileError, RequestError
from specc.progress import PhaseTimer
from specc.system.json_file import JsonError, parse_json

if TYPE_CHECKING:
    from specc.cli.options.bench import BenchOptions

_FORM = 'a line such as {"question_id": 81, "category": "writing", "turns": ["…", "…"]}'
_DO = "correct the line"
_PARQUET = b"PAR1"
# what SPEED-Bench has in place of text that it must not hand on
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def run_dataset_bench(directory: Path, file: Path, options: BenchOptions) -> None:
    """Measure, and print or write the report.

    Raises:
        SpeccError: of an option, of the file, of the engine or of its chat template.
    """
    options.check_outputs()
    questions = read_dataset(file)
    with make_listener() as listen:
        report = measure_dataset(directory, questions, options, PhaseTimer(listen))
    from specc.cli.bench.engine_table import print_report

    put_out(report, options, print_report)


def measure_dataset(
    directory: Path,
    questions: Sequence[Question],
    options: BenchOptions,
    phases: PhaseTimer,
) -> dict[str, Any]:
    """Load the engine, run the rounds, and make the report.

    Raises:
        SpeccError: of an option, of the engine or of its chat template; no question fits.
    """
    settings = options.settings()
    import torch

    from specc.bench.conversations import ConversationContender, TalkMeasurement, Tokens
    from specc.bench.questions import by_category
    from specc.bench.report import Bench, make_report
    from specc.bench.rounds import OFF, SPECULATIVE, Contender, run_rounds
    from specc.bench.step_bytes import measure_read_bandwidth
    from specc.runtime.requests.chat_template import load_template

    with phases.phase("load engine"):
        engine = replace(options.args, engine=directory, max_num_seqs=options.batch_size).load()
    if engine.tokenizer is None:
        raise RequestError(
            f"--dataset {options.dataset}, and an engine without a tokenizer",
            "an engine whose tokenizer reads text",
            "compile it with --tokenizer, or pass --prompts FILE with token ids",
        )
    plans = plans_beside_off(engine, options)
    template = load_template(directory)
    try:
        tokens = Tokens(engine, template, options.tokens)
        categories = by_category(questions, options.num_prompts)
        kept = [question for own in categories.values() for question in own]
        if not any(tokens.of([{"role": "user", "content": q.turns[0]}]) for q in kept):
            raise RequestError(
                f"{options.dataset}, none of whose questions leaves room for {options.tokens}"
                f" tokens of the engine's {engine.max_seq_len}",
                "a question and its answer in the engine's max_seq_len",
                "lower --tokens, or compile with a larger --max-seq-len",
            )
        with phases.phase("read bandwidth"):
            bandwidth = measure_read_bandwidth()
        contenders: list[Contender] = [
            ConversationContender(
                engine, name, plan, categories, tokens, options.tokens, options.batch_size
            )
            for name, plan in [(OFF, OFF), *((SPECULATIVE, plan) for plan in plans)]
        ]
        with phases.phase("rounds") as advance:
            rounds = run_rounds(contenders, options.rounds, options.warmup, advance)
    finally:
        if template is not None:
            template.close()
    first = rounds.of(OFF)[0]
    assert isinstance(first, TalkMeasurement), "what a ConversationContender measures"
    settings.num_prompts = first.num_questions
    settings.num_prompt_tokens = sum(map(len, first.prompts))
    settings.threads = torch.get_num_threads()
    notes: list[str] = []
    if template is None:
        notes.append("turns and answers are joined by empty lines: the engine has no chat template")
    if first.num_left_out:
        num_turns = len(first.turns) + first.num_left_out
        notes.append(
            f"{first.num_left_out} of {num_turns} turns were left out: with {options.tokens} tokens"
            f" to follow, they are longer than the engine's {engine.max_seq_len}"
        )
    bench = Bench(
        directory, engine, settings, first.prompts, rounds, bandwidth, notes, questions=kept
    )
    return make_report(bench, command_line())


def read_dataset(path: Path) -> list[Question]:
    """All questions of a file: Spec-Bench's question.jsonl, or SPEED-Bench as JSON lines.

    Both have `question_id`, `category` and `turns`, what the user says; other keys (`reference`,
    `sub_category`, `source`, …) are left aside.

    Raises:
        InputFileError: no such file, Parquet, no UTF-8, or a line that is no question.
        RequestError: no line.
    Source: Spec-Bench, arXiv:2401.07851; SPEED-Bench, arXiv:2604.09557.
    """
    data = read_bytes(path)
    if data.startswith(_PARQUET):
        raise InputFileError(
            f"{path}, which is Parquet",
            "JSON lines",
            f"convert it, for example with pandas: read_parquet({path.name!r})"
            f".to_json({path.with_suffix('.jsonl').name!r}, orient='records', lines=True)",
        )
    # splitlines() would also cut at characters that JSON allows inside strings
    lines = enumerate(decode(data, str(path)).split("\n"), start=1)
    found = [_read_line(f"{path}, line {n}", line) for n, line in lines if line.strip()]
    if not found:
        raise RequestError(f"{path} is empty", "a question on each line", "choose another file")
    return found


def _read_line(place: str, line: str) -> Question:
    try:
        value = parse_json(line, exact=True)
    except JsonError as error:
        raise InputFileError(f"{place}: no JSON ({error})", _FORM, _DO) from error
    if not isinstance(value, dict):
        raise InputFileError(f"{place}: no object", _FORM, _DO)
    for key in ("question_id", "category", "turns"):
        if key not in value:
            raise InputFileError(f"{place}: no {key}", _FORM, _DO)
    number, category, turns = value["question_id"], value["category"], value["turns"]
    if type(number) is not int and not (isinstance(number, str) and number):
        raise InputFileError(f"{place}: a question_id that is no number and no text", _FORM, _DO)
    if not isinstance(category, str) or not category:
        raise InputFileError(f"{place}: a category that is no text", _FORM, _DO)
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise InputFileError(f"{place}: turns that are no list of texts", _FORM, _DO)
    if any(_PLACEHOLDER in turn for turn in turns):
        raise InputFileError(
            f"{place}: a placeholder of SPEED-Bench instead of a turn's text",
            "the data set with the texts of its sources",
            "run prepare_data.py of Model Optimizer's specdec_bench, and convert what it writes",
        )
    return Question(str(number), category, tuple(turns))


def _is_text(turn: Any) -> bool:
    """Text that a tokenizer takes: JSON can hold halves of characters, which are none."""
    if not isinstance(turn, str) or not turn.strip():
        return False
    try:
        turn.encode()
    except UnicodeEncodeError:
        return False
    return True
