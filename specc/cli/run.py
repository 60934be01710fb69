"""`specc run`: prompts from the command line, a file or a pipe; text as it comes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specc.cli.limit import Limit
from specc.cli.prompts import (
    PromptLine,
    decode,
    needs_ids,
    not_empty,
    note_keys,
    read_bytes,
    read_prompt_lines,
)
from specc.errors import RequestError
from specc.sampling.params import SamplingParams

# without an option, and where the checkpoint says nothing
_MAX_TOKENS = 128

if TYPE_CHECKING:
    from specc.cli.options.common import PromptSource
    from specc.cli.options.sampling import SamplingOptions
    from specc.runtime.engine_args import EngineArgs
    from specc.runtime.llm import LLM
    from specc.runtime.outputs.logprobs import TokenLogprobs
    from specc.runtime.outputs.request_output import CompletionOutput, RequestOutput, StreamOutput
    from specc.speculation.metrics import SpecStats


def read_source(source: PromptSource) -> list[PromptLine]:
    """The prompts, none of them empty.

    Raises:
        RequestError: no prompt, an empty one, or several sources.
        InputFileError: a file that cannot be read as UTF-8 text.
    """
    places = {"PROMPT": source.prompt, "--file": source.file, "--prompts": source.prompts}
    given = [name for name, value in places.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)}", "one source of prompts", "pass one")
    if source.prompts is not None:
        lines = read_prompt_lines(source.prompts)
        note_keys(source.prompts, [key for line in lines for key in line.others])
        return lines
    if source.file is not None:
        return [_line(read_bytes(source.file), str(source.file))]
    if source.prompt is not None:
        # bytes that are no UTF-8 reach Python as lone surrogates
        return [_line(source.prompt.encode("utf-8", "surrogateescape"), "the prompt")]
    if sys.stdin.isatty():
        raise RequestError(
            "no prompt", "text to continue", 'pass "PROMPT", --file F, or pipe it in'
        )
    return [_line(sys.stdin.buffer.read(), "standard input")]


def run_request(
    args: EngineArgs,
    source: PromptSource,
    sampling: SamplingOptions,
    *,
    stats: bool,
    as_json: bool,
) -> None:
    """Load the engine and print what it generates.

    Raises:
        SpeccError: of the engine, of a prompt, of a parameter.
    """
    lines = read_source(source)  # before the engine loads: a bad file fails at once
    file = source.prediction
    predicted = None if file is None else decode(read_bytes(file), str(file))
    common = sampling.given()
    # also what the defaults of the engine do not change
    params = [line.params(common) for line in lines]
    if not as_json and any(own.logprobs is not None for own in params):
        raise RequestError(
            "--logprobs without --json", "--json, which has a place for them", "add --json"
        )
    if not as_json and any(own.prompt_logprobs is not None for own in params):
        raise RequestError(
            "prompt_logprobs without --json", "--json, which has a place for them", "add --json"
        )
    from specc.runtime.llm import LLM

    if sum(own.n for own in params) == 1:
        args = replace(args, max_num_seqs=1)
    llm = LLM.from_engine_args(args)
    common = {"max_tokens": _MAX_TOKENS, **llm.default_options, **common}
    params = [line.params(common) for line in lines]
    _note_unused(sampling, params)
    limits = [
        Limit(
            own.max_tokens,
            sampling.max_tokens is not None or "max_tokens" in line.options,
            llm.engine.max_seq_len,
        )
        for own, line in zip(params, lines, strict=True)
    ]
    for limit in limits:
        limit.check()
    prompts = [line.prompt for line in lines]
    needs_ids(prompts, llm.tokenizer is not None)
    predictions = [predicted if line.prediction is None else line.prediction for line in lines]
    if as_json or sum(own.n for own in params) > 1:
        outputs = llm.generate(prompts, params, _progress(len(prompts)), prediction=predictions)
        if as_json:
            _print_json(outputs, llm.get_metrics())
        else:
            _print_outputs(outputs, llm.tokenizer is not None)
            ends = [
                (completion, len(completion.token_ids), limit)
                for output, limit in zip(outputs, limits, strict=True)
                for completion in output.outputs
            ]
            _note_ends(ends)
        sequences = [
            [*output.prompt_token_ids, *completion.token_ids]
            for output in outputs
            for completion in output.outputs
        ]
    else:
        sequences = [_stream(llm, prompts[0], params[0], limits[0], predictions[0])]
    if stats:
        from specc.bench.plain_speed import measure_plain
        from specc.cli.render import print_stats

        metrics = llm.get_metrics()
        print_stats(metrics, measure_plain(llm.engine, sequences, metrics))


def _line(data: bytes, name: str) -> PromptLine:
    """A prompt that is not of a file of JSON lines."""
    return PromptLine(name, not_empty(decode(data, name), name), {})


def _note_unused(sampling: SamplingOptions, params: Sequence[SamplingParams]) -> None:
    """Options of sampling change nothing where every request is greedy."""
    given = sampling.unused_when_greedy()
    if given and all(own.is_greedy for own in params):
        verb = "has" if len(given) == 1 else "have"
        _note(f"{', '.join(given)} {verb} no effect at temperature 0: nothing is drawn")


def _note_ends(outputs: Sequence[tuple[CompletionOutput | StreamOutput, int, Limit]]) -> None:
    """Outputs that end because of a limit that nobody asked for, or of an error.

    Args:
        outputs: each with its number of tokens, and what it may have.
    """
    reasons = Counter(
        reason
        for output, count, limit in outputs
        if output.finish_reason == "length" and (reason := limit.reason(count))
    )
    for reason, count in reasons.items():
        which = "the output ends" if len(outputs) == 1 else f"{count} of {len(outputs)} outputs end"
        _note(f"{which} {reason}")
    for number, (output, _, _) in enumerate(outputs, start=1):
        if output.finish_reason == "error":
            which = "the output" if len(outputs) == 1 else f"output {number}"
            _note(f"{which} cannot go on: {output.stop_reason}")


def _note(text: str) -> None:
    sys.stdout.flush()  # in this order, also where both go to one place
    print(f"note: {text}", file=sys.stderr)


def _stream(
    llm: LLM, prompt: str | list[int], params: SamplingParams, limit: Limit, prediction: Any
) -> list[int]:
    """Print an output as it comes; returns the token ids of the prompt and of the output."""
    last, count, token_ids = "", 0, _token_ids(llm, prompt)
    for event in llm.stream([prompt], params, prediction=[prediction]):
        if event.token_id is not None:
            token_ids.append(event.token_id)
        # without a tokenizer, tokens are all there is
        text = event.text if llm.tokenizer is not None else f"{event.token_id} "
        sys.stdout.write(text)
        sys.stdout.flush()
        last, count = text or last, count + 1
        if event.finished:
            end = event
    if not last.endswith("\n"):
        sys.stdout.write("\n")
    _note_ends([(end, count, limit)])
    return token_ids


def _token_ids(llm: LLM, prompt: str | list[int]) -> list[int]:
    from specc.runtime.requests.request_maker import RequestMaker

    return RequestMaker(llm.engine, None).tokenize(prompt) if isinstance(prompt, str) else [*prompt]


def _print_outputs(outputs: Iterable[RequestOutput], has_text: bool) -> None:
    for number, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            which = f"{number}.{completion.index + 1}" if len(output.outputs) > 1 else str(number)
            print(f"--- {which}: {len(completion.token_ids)} tokens, {completion.finish_reason}")
            print(completion.text if has_text else " ".join(map(str, completion.token_ids)))


def _print_json(outputs: Iterable[RequestOutput], metrics: SpecStats) -> None:
    items = []
    for output in outputs:
        item = {
            "prompt": output.prompt,
            "num_prompt_tokens": len(output.prompt_token_ids),
            **_completion(output.outputs[0]),
        }
        if len(output.outputs) > 1:
            item["outputs"] = [_completion(completion) for completion in output.outputs]
        if output.prompt_logprobs is not None:
            item["prompt_logprobs"] = [_row(entries) for entries in output.prompt_logprobs]
        items.append({**item, "metrics": output.metrics.as_dict()})
    print(json.dumps({"outputs": items, "metrics": metrics.as_dict()}, ensure_ascii=False))


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    data: dict[str, Any] = {"text": completion.text, "token_ids": completion.token_ids}
    if completion.logprobs is not None:
        data["cumulative_logprob"] = completion.cumulative_logprob
        data["logprobs"] = [_row(entries) for entries in completion.logprobs]
    data["finish_reason"] = completion.finish_reason
    data["stop_reason"] = completion.stop_reason
    return data


def _row(entries: TokenLogprobs | None) -> list[dict[str, Any]] | None:
    """Of a token and of the best ones beside it; nothing came before the first of a prompt."""
    if entries is None:
        return None
    return [
        {"token_id": token, "logprob": entry.logprob, "rank": entry.rank}
        for token, entry in entries.items()
    ]


def _progress(num_prompts: int) -> Any:
    """Counts on one line of a terminal while a batch runs."""
    if num_prompts == 1 or not sys.stderr.isatty():
        return None

    def show(finished: int, total: int, num_tokens: int) -> None:
        end = "\n" if finished == total else ""
        sys.stderr.write(f"\r{finished}/{total} prompts, {num_tokens} tokens{end}")
        sys.stderr.flush()

    return show
