"""`specc bench --dataset`: conversations of published data sets, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.bench.engine import plans_beside_off
from specc.cli.bench.report import command_line, put_out
from specc.cli.dataset import read_dataset
from specc.cli.progress import make_listener
from specc.errors import RequestError
from specc.progress import PhaseTimer

if TYPE_CHECKING:
    from specc.bench.questions import Question
    from specc.cli.options.bench import BenchOptions


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
