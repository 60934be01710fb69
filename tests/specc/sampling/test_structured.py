"""What a StructuredOutputsParams takes, and what it refuses before any engine sees it."""

from __future__ import annotations

import json

import pytest

from specc.errors import RequestError
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams

RECURSIVE: dict = {}
RECURSIVE["items"] = RECURSIVE
WRONG = {
    "nothing": {},
    "two": {"regex": "a", "choice": ["a"]},
    "schema-is-no-json": {"json": "{"},
    "schema-is-a-number": {"json": "3"},
    "schema-of-python-objects": {"json": {"const": object()}},
    "schema-of-nan": {"json": {"const": float("nan")}},
    "schema-in-itself": {"json": RECURSIVE},
    "schema-too-deep": {"json": '{"items":' * 100_000},
    "schema-is-a-list": {"json": [1]},
    "schema-with-half-a-character": {"json": {"const": "\ud800"}},
    "regex-is-empty": {"regex": ""},
    "regex-is-no-text": {"regex": 3},
    "regex-with-half-a-character": {"regex": "\ud800"},
    "no-choices": {"choice": []},
    "choice-is-a-string": {"choice": "ab"},
    "choice-of-numbers": {"choice": [1]},
    "empty-choice": {"choice": ["a", ""]},
    "grammar-is-empty": {"grammar": ""},
    "json-object-is-text": {"json_object": "yes"},
    "white-space-of-a-regex": {"regex": "a", "disable_any_whitespace": True},
    "two-kinds-of-white-space": {
        "json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " ?"
    },
    "properties-of-a-regex": {"regex": "a", "disable_additional_properties": True},
    "a-regex-that-is-lenient": {"regex": "a", "lenient": True},
    "lenient-is-no-switch": {"json_object": True, "lenient": 1},
    "openings-are-a-string": {"regex": "a", "free_openings": "ab"},
    "empty-opening": {"regex": "a", "free_openings": ["b", ""]},
    "white-space-is-no-text": {"json_object": True, "whitespace_pattern": 3},
}  # fmt: skip


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_wrong_options(options) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**options)


class _Pydantic:
    @classmethod
    def model_json_schema(cls) -> dict:
        return {"type": "integer"}


@pytest.mark.parametrize("json", [{"type": "integer"}, '{"type": "integer"}', _Pydantic])
def test_schemas_in_every_form(json) -> None:
    params = StructuredOutputsParams(json=json)
    assert (params.kind, params.text) == ("json", '{"type": "integer"}')


def test_any_object_is_a_schema() -> None:
    params = StructuredOutputsParams(json_object=True, regex=None)
    assert (params.kind, params.text) == ("json", '{"type": "object"}')


def test_keys_tell_grammars_apart() -> None:
    made = [
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        StructuredOutputsParams(json_object=True, whitespace_pattern=" ?"),
        StructuredOutputsParams(json_object=True, disable_additional_properties=False),
        StructuredOutputsParams(json_object=True, lenient=True),
        StructuredOutputsParams(regex="a"),
        StructuredOutputsParams(regex="a", free_openings=["b"]),
        StructuredOutputsParams(grammar="a"),
        StructuredOutputsParams(choice=["a"]),
        StructuredOutputsParams(choice=["a", "b"]),
    ]
    assert len({params.key for params in made}) == len(made)
    assert len({params.digest for params in made}) == len(made)
    assert StructuredOutputsParams(json_object=True).key == made[0].key


@pytest.mark.parametrize("count", [1, 1999, 2000, 2001, 4000, 5001])
def test_many_choices_are_the_same_text(count) -> None:
    choices = [f'"{i}\\ ä, [' for i in range(count)]
    for given in (choices, tuple(choices)):
        assert StructuredOutputsParams(choice=given).text == json.dumps(choices, ensure_ascii=False)


def test_sampling_params_take_nothing_else() -> None:
    params = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
