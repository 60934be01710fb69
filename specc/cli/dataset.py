"""Files of published data sets, as users have them: Spec-Bench and SPEED-Bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.bench.questions import Question
from specc.cli.prompts import decode, read_bytes
from specc.errors import InputFileError, RequestError
from specc.system.json_file import JsonError, parse_json

_FORM = 'a line such as {"question_id": 81, "category": "writing", "turns": ["…", "…"]}'
_DO = "correct the line"
_PARQUET = b"PAR1"
# what SPEED-Bench has in place of text that it must not hand on
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


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
