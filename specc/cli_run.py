"""`specc run`: prompts from the command line, a file or a pipe; text as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import InputFileError, RequestError
from specc.json_file import JsonError, parse_json
from specc.machine import check_threads
from specc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specc.metrics import SpecStats
    from specc.runtime.llm import LLM
    from specc.runtime.outputs import RequestOutput


@dataclass(frozen=True)
class Request:
    """What the command line asks for; the prompt comes from one place.

    Args:
        prompt: text.
        file: UTF-8 text, one prompt.
        prompts: JSON lines with `prompt`.
        sampling: further options of `SamplingParams`.
    """

    prompt: str | None = None
    file: Path | None = None
    prompts: Path | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            **self.sampling,
        )

    def read(self) -> list[str]:
        """The prompts, none of them empty.

        Raises:
            RequestError: no prompt, an empty one, or several sources.
            InputFileError: a file that cannot be read as UTF-8 text.
        """
        given = [
            name
            for name, value in (
                ("PROMPT", self.prompt),
                ("--file", self.file),
                ("--prompts", self.prompts),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)}", "one source of prompts", "pass one")
        if self.prompts is not None:
            return list(read_prompt_lines(self.prompts))
        if self.file is not None:
            return [_not_empty(_decode(_read_bytes(self.file), str(self.file)), str(self.file))]
        if self.prompt is not None:
            # bytes that are no UTF-8 reach Python as lone surrogates
            raw = self.prompt.encode("utf-8", "surrogateescape")
            return [_not_empty(_decode(raw, "the prompt"), "the prompt")]
        if sys.stdin.isatty():
            raise RequestError(
                "no prompt", "text to continue", 'pass "PROMPT", --file F, or pipe it in'
            )
        name = "standard input"
        return [_not_empty(_decode(sys.stdin.buffer.read(), name), name)]


@dataclass(frozen=True)
class Loading:
    """How the engine is loaded; the fields are those of `LLM`."""

    plan: str | None = None
    policy: str | None = None
    verify: bool | None = None
    threads: int | None = None
    backend: str | None = None


def run_request(
    engine: Path, request: Request, loading: Loading, *, stats: bool, as_json: bool
) -> None:
    """Load the engine and print what it generates.

    Raises:
        SpeccError: of the engine, of a prompt, of a parameter.
    """
    check_threads(loading.threads)
    params = request.params()
    prompts = request.read()  # before the engine loads: a bad file fails at once
    from specc.runtime.llm import LLM

    llm = LLM(
        engine,
        plan=loading.plan,
        policy=loading.policy,
        verify=loading.verify,
        num_threads=loading.threads,
        backend=loading.backend,
        max_num_seqs=1 if len(prompts) == 1 else None,
    )
    if as_json or len(prompts) > 1:
        outputs = llm.generate(prompts, params, _progress(len(prompts)))
        if as_json:
            _print_json(outputs, llm.get_metrics())
        else:
            _print_outputs(outputs)
    else:
        _stream(llm, prompts[0], params)
    if stats:
        from specc.cli_stats import print_stats

        print_stats(llm.get_metrics())


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    last = ""
    for event in llm.stream(prompt, params):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        last = event.text or last
    if not last.endswith("\n"):
        sys.stdout.write("\n")


def _print_outputs(outputs: Iterable[RequestOutput]) -> None:
    for number, output in enumerate(outputs, start=1):
        completion = output.outputs[0]
        print(f"--- {number}: {len(completion.token_ids)} tokens, {completion.finish_reason}")
        print(completion.text)


def _print_json(outputs: Iterable[RequestOutput], metrics: SpecStats) -> None:
    items = []
    for output in outputs:
        completion = output.outputs[0]
        items.append(
            {
                "prompt": output.prompt,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "metrics": output.metrics.as_dict(),
            }
        )
    print(json.dumps({"outputs": items, "metrics": metrics.as_dict()}, ensure_ascii=False))


def _progress(num_prompts: int) -> Any:
    """Counts on one line of a terminal while a batch runs."""
    if num_prompts == 1 or not sys.stderr.isatty():
        return None

    def show(finished: int, total: int, num_tokens: int) -> None:
        end = "\n" if finished == total else ""
        sys.stderr.write(f"\r{finished}/{total} prompts, {num_tokens} tokens{end}")
        sys.stderr.flush()

    return show


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputFileError(
            f"{path}: {error.strerror}", "a readable text file", "check the path"
        ) from error


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"{name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8",
            "UTF-8 text",
            "convert it, for example: iconv -f latin1 -t utf-8",
        ) from error


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise RequestError(f"{name} is empty", "text to continue", "write a prompt")
    return text


def read_prompt_lines(path: Path) -> Iterable[str]:
    """Prompts of a file of JSON lines."""
    text = _decode(_read_bytes(path), str(path))
    # splitlines() would also cut at characters that JSON allows inside strings
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise RequestError(f"{path} is empty", "a JSON object on each line", "write a prompt")
    for number, line in lines:
        try:
            value = parse_json(line)
        except JsonError as error:
            raise InputFileError(
                f"{path}, line {number}: no JSON ({error})",
                'a line such as {"prompt": "text"}',
                "correct the line",
            ) from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str):
            raise InputFileError(
                f"{path}, line {number}: no text under the key prompt",
                'a line such as {"prompt": "text"}',
                "correct the line",
            )
        yield _not_empty(prompt, f"{path}, line {number}")
