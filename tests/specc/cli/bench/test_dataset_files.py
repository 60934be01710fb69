"""Files of Spec-Bench and SPEED-Bench: what is read of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from specc.bench.questions import MT_BENCH, Question, by_category, groups_of
from specc.cli.bench.dataset import read_dataset
from specc.errors import InputFileError, RequestError

# a line of each, with the keys that the files have
SPEC_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["Compose a travel blog.", "Rewrite it."],
    "reference": ["none"],
}
SPEED_BENCH = {
    "question_id": "3f5c",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Write a loop.\u2028Now."],
    "source": "a",
    "src_id": "b",
    "difficulty": "easy",
    "multiturn": False,
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "question.jsonl"


def test_both_formats(file):
    lines = [json.dumps(SPEC_BENCH), "", json.dumps(SPEED_BENCH, ensure_ascii=False)]
    file.write_text("\r\n".join(lines) + "\n", encoding="utf-8")
    assert read_dataset(file) == [
        Question("81", "writing", ("Compose a travel blog.", "Rewrite it.")),
        # a separator of lines within a text is none of the file's
        Question("3f5c", "coding", ("Write a loop.\u2028Now.",)),
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"turns": []}, "turns that are no list of texts"),
        ({"turns": "text"}, "turns that are no list of texts"),
        ({"turns": ["a", " "]}, "turns that are no list of texts"),
        ({"turns": ["a", 1]}, "turns that are no list of texts"),
        ({"turns": ["half of a character \ud83d"]}, "turns that are no list of texts"),
        ({"turns": None}, "turns that are no list of texts"),
        ({"category": ""}, "a category that is no text"),
        ({"category": 3}, "a category that is no text"),
        ({"question_id": None}, "a question_id"),
        ({"question_id": True}, "a question_id"),
        (
            {
                "turns": [
                    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
                    "\n\n{question}"
                ]
            },
            "a placeholder of SPEED-Bench",
        ),
    ],
)
def test_a_malformed_line_is_told_with_its_number(file, change, found):
    file.write_text(json.dumps(SPEC_BENCH) + "\n" + json.dumps(SPEC_BENCH | change) + "\n")
    with pytest.raises(InputFileError) as caught:
        read_dataset(file)
    assert f"question.jsonl, line 2: {found}" in caught.value.found


@pytest.mark.parametrize("key", ["question_id", "category", "turns"])
def test_a_key_that_is_absent(file, key):
    file.write_text(json.dumps({name: SPEC_BENCH[name] for name in SPEC_BENCH if name != key}))
    with pytest.raises(InputFileError, match=f"line 1: no {key}"):
        read_dataset(file)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"question_id": 1,', "line 1: no JSON"),
        (b'[{"question_id": 1}]', "line 1: no object"),
        (b'{"turns": ["a"], "turns": ["b"]}', "comes twice"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_files_of_other_kinds(file, data, found):
    file.write_bytes(data)
    with pytest.raises(InputFileError) as caught:
        read_dataset(file)
    assert found in caught.value.found


def test_no_file_and_no_line(file):
    with pytest.raises(InputFileError, match="No such file"):
        read_dataset(file)
    file.write_text("\n\n")
    with pytest.raises(RequestError, match="empty"):
        read_dataset(file)


def test_questions_of_each_category():
    questions = [Question(str(i), "ab"[i % 2], ("x",)) for i in range(5)]
    found = by_category(questions, most=2)
    assert {name: [q.question_id for q in own] for name, own in found.items()} == {
        "a": ["0", "2"],
        "b": ["1", "3"],
    }
    assert len(by_category(questions)["a"]) == 3


def test_mt_bench_is_one_as_published():
    parts = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]
    whole = dict.fromkeys([*parts, "humanities", "rag"])
    assert groups_of(whole) == {MT_BENCH: [*parts, "humanities"]}
    assert groups_of(dict.fromkeys([*parts, "rag"])) == {}
    # all of the file: no group beside "all"
    assert groups_of(dict.fromkeys([*parts, "humanities"])) == {}
