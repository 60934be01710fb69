"""Schemas as they are meant: no number is rounded, objects are closed, white space has an end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.constraints.json_schema import prepared
from specc.sampling.structured import StructuredOutputsConfig, StructuredOutputsParams
from tests.runtime.constraints.test_grammar_masks import EOS, VOCAB, byte_tokenizer
from tests.runtime.constraints.test_grammars import allows

TOKENIZER = byte_tokenizer(["<|end|>", "<|eot|>"])
BIG = 1 << 53
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, VOCAB, EOS)
    yield made
    made.close()


def found(grammars: Grammars, schema: Any, *texts: str, **options: Any) -> list[str]:
    """Which of some texts a schema allows."""
    params = StructuredOutputsParams(json=schema, **options)
    grammars.start(params)
    return [text for text in texts if allows(grammars.start(params), text, TOKENIZER)]


@pytest.mark.parametrize(
    "part",
    [
        {"minimum": BIG + 1},
        {"maximum": BIG + 1},
        {"maximum": -BIG - 1},
        {"maximum": 2**63 - 1},
        {"maximum": 10**25},
        {"exclusiveMinimum": BIG},
        {"exclusiveMaximum": -BIG},
        {"type": "number", "minimum": 123456789.12345679},
        {"type": "number", "maximum": 5e-324},
        {"type": "number", "minimum": 0.30000000000000004},
        {"multipleOf": 10**9},
        {"multipleOf": 2**32 - 1},
        {"multipleOf": BIG + 1},
        {"allOf": [{"multipleOf": 99999}, {"multipleOf": 4000}]},
        {"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]},
        {"const": BIG + 1},
        {"const": {"a": [BIG + 1]}},
        {"enum": ["x", -BIG - 1]},
        {"enum": [1.2345678901234567]},
        {"items": [{"maximum": BIG + 1}]},
        {"$defs": {"x": {"maximum": BIG + 1}}},
        {"properties": {"x": {"anyOf": [{"maximum": BIG + 1}, {}]}}},
        {"additionalProperties": {"const": BIG + 1}},
    ],
    ids=json.dumps,
)
def test_what_the_library_would_round_is_refused(grammars, part) -> None:
    schema = {"type": "integer"} | part if not {"items", "properties"} & part.keys() else part
    for closes in (True, False):
        with pytest.raises(RequestError, match=r"rounds|multipleOf"):
            prepared(json.dumps(schema), closes)
    with pytest.raises(RequestError, match=r"rounds|multipleOf"):
        found(grammars, schema)


def test_a_number_counts_as_it_is_written(grammars) -> None:
    """A dict has lost what a text still has."""
    with pytest.raises(RequestError, match="minimum of a JSON schema"):
        found(grammars, '{"type": "number", "minimum": 0.1000000000000000055511151231257827}')
    assert found(grammars, '{"type": "number", "minimum": 0.1}', "0.1", "0.09") == ["0.1"]


def test_numbers_that_are_exact_stay(grammars) -> None:
    for bound, inside, outside in (
        ({"minimum": BIG}, BIG, BIG - 1),
        ({"maximum": -BIG}, -BIG, 1 - BIG),
        ({"exclusiveMaximum": BIG - 1}, BIG - 2, BIG - 1),
        ({"exclusiveMinimum": BIG - 1}, BIG, BIG - 1),
        ({"const": BIG}, BIG, BIG - 1),
        ({"multipleOf": 10**8}, 3 * 10**8, 10**8 + 1),
        ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, 24, 28),
    ):
        texts = (str(inside), str(outside))
        assert found(grammars, {"type": "integer"} | bound, *texts) == [texts[0]], bound
    # where it bounds nothing
    large = {"type": "integer", "default": BIG + 1, "examples": [BIG + 1], "maximum": 7}
    assert found(grammars, large, "7", "8") == ["7"]
    named = {"type": "object", "properties": {"maximum": {"type": "null"}}}
    assert found(grammars, named, '{"maximum":null}') == ['{"maximum":null}']


def test_objects_have_no_other_properties(grammars) -> None:
    texts = ('{"a":1}', '{"a":1,"x":2}', "{}")
    assert found(grammars, {"type": "object"} | A, *texts) == [texts[0], texts[2]]
    assert found(grammars, A | {"type": "object"}, *texts, disable_additional_properties=False) == [
        *texts
    ]
    # what the schema says itself holds
    for own in (True, {"type": "integer"}):
        assert found(grammars, A | {"type": "object", "additionalProperties": own}, *texts) == [
            *texts
        ]
    # nor has an object that names none any bounds
    assert found(grammars, {"type": "object"}, *texts) == [*texts]


def test_objects_are_closed_wherever_they_are(grammars) -> None:
    inner = {"type": "object"} | A
    for schema, form in (
        ({"type": "array", "items": inner}, "[%s]"),
        ({"type": "array", "prefixItems": [inner]}, "[%s]"),
        ({"type": "object", "properties": {"o": inner}}, '{"o":%s}'),
        ({"type": "object", "additionalProperties": inner}, '{"o":%s}'),
        ({"anyOf": [inner, {"type": "null"}]}, "%s"),
        ({"$ref": "#/$defs/o", "$defs": {"o": inner}}, "%s"),
        ({"$ref": "#/$defs/o", "description": "one", "$defs": {"o": inner}}, "%s"),
        ({"allOf": [{"$ref": "#/definitions/o"}], "definitions": {"o": inner}}, "%s"),
    ):
        texts = (form % '{"a":1}', form % '{"a":1,"x":2}')
        assert found(grammars, schema, *texts) == [texts[0]], schema
        assert found(grammars, schema, *texts, disable_additional_properties=False) == [*texts]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        A | {"allOf": [B]},
        A | {"anyOf": [B, {"properties": {"c": {"type": "null"}}}]},
        A | {"$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": {"allOf": [A]}}},
        A | {"required": ["b"]},
    ],
    ids=json.dumps,
)
def test_schemas_of_one_value_allow_what_any_of_them_names(grammars, schema) -> None:
    whole = {"type": "object"} | schema
    texts = ('{"a":1,"b":2}', '{"a":1,"b":2,"x":3}')
    assert found(grammars, whole, *texts) == [texts[0]]


def test_a_branch_has_the_properties_of_no_other(grammars) -> None:
    kinds = [
        {"properties": {"kind": {"const": "b"}, "b": {"type": "integer"}}, "required": ["kind"]},
        {"properties": {"kind": {"const": "c"}, "c": {"type": "null"}}, "required": ["kind"]},
    ]
    schema = {"type": "object"} | A | {"anyOf": kinds}
    good = '{"a":1,"kind":"b","b":2}', '{"kind":"c","c":null}'
    assert found(grammars, schema, *good, '{"kind":"b","c":null}') == [*good]


def test_a_definition_that_is_used_twice_is_closed_for_each(grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/a"}, "both": {"allOf": [{"$ref": "#/$defs/a"}, B]}},
        "$defs": {"a": A | {"type": "object"}},
    }
    good = '{"one":{"a":1},"both":{"a":1,"b":2}}'
    assert found(grammars, schema, good, '{"one":{"a":1,"b":2}}') == [good]
    # and left open where another one says so
    schema["properties"]["both"]["additionalProperties"] = True
    good = '{"both":{"a":1,"x":3}}'
    assert found(grammars, schema, good, '{"one":{"a":1,"x":3}}') == [good]


def test_schemas_in_schemas_are_followed_once(grammars) -> None:
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "k": {"$ref": "#/$defs/n"}}}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    good = '{"v":1,"k":{"v":2}}'
    assert found(grammars, schema, good, '{"v":1,"k":{"x":2}}') == [good]


def test_white_space_has_an_end(grammars) -> None:
    schema = {"type": "object"} | A
    good = ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{\n\n\t"a": 1}', "{" + "\n" + " " * 20 + "}")
    bad = ('{  "a":1}', '{\n\n\n"a":1}', "{\n" + " " * 21 + "}")
    assert found(grammars, schema, *good, *bad) == [*good]
    assert found(grammars, schema, *good, *bad, disable_any_whitespace=False) == [*good]
    assert found(grammars, schema, *good, disable_any_whitespace=True) == [good[0]]
    assert found(grammars, schema, *good, *bad, whitespace_pattern=r"[ \n\t]+") == [*good, *bad]
    # what a schema says itself, as the library has it
    own = schema | {"x-guidance": {"whitespace_flexible": False}}
    assert found(grammars, own, *good) == [good[0]]


LACKING = {
    "uniqueItems": {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"type": "integer", "if": {"const": 3}, "then": {"const": 4}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "format": {"type": "string", "format": "iri-reference"},
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_library_lacks_is_refused_or_ignored(grammars, caplog, name) -> None:
    text = {"array": "[null]", "integer": "3", "object": "{}", "string": '"x"'}
    text = text[LACKING[name]["type"]]
    with pytest.raises(RequestError, match=name):
        found(grammars, LACKING[name], text)
    with caplog.at_level(logging.WARNING):
        assert found(grammars, LACKING[name], text, lenient=True) == [text]
    assert "iri-reference" if name == "format" else name in caplog.text


def test_an_engine_has_its_own_defaults() -> None:
    made = Grammars(TOKENIZER, VOCAB, EOS)
    schema, texts = {"type": "object"} | A, ('{"a":1}', '{"a": 1}', '{"a":1,"x":2}')
    assert found(made, schema, *texts) == [*texts[:2]]
    made.config = StructuredOutputsConfig.read(
        '{"disable_any_whitespace": true, "disable_additional_properties": false, "backend": "x"}'
    )
    assert found(made, schema, *texts) == [texts[0], texts[2]]
    # a request goes first
    assert found(made, schema, *texts, disable_any_whitespace=False) == [*texts]
    assert found(made, schema, *texts, disable_additional_properties=True) == [texts[0]]
    made.config = StructuredOutputsConfig.read({"lenient": True})
    assert found(made, LACKING["not"], "3") == ["3"]
    made.close()


@pytest.mark.parametrize("value", ["{", "[]", {"lenient": 1}, {"other": True}, '{"lenient": null}'])
def test_what_is_no_config_is_refused(value) -> None:
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        StructuredOutputsConfig.read(value)
