"""Defaults of sampling that a checkpoint's generation_config.json brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specc.errors import ConfigError, EngineError
from specc.sampling.generation_config import FILE, SamplingDefaults, read_defaults
from specc.sampling.params import SamplingParams

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / FILE).write_text(text)
    return directory


def test_what_vllm_takes_is_taken_and_nothing_else(tmp_path: Path) -> None:
    engine = write(
        tmp_path,
        {**OWN, "max_new_tokens": 99, "do_sample": False, "eos_token_id": [1, 2], "typical_p": 0.3}
        | {"presence_penalty": 1.5, "max_length": 4096, "transformers_version": "5.0.0"},
    )
    defaults = read_defaults(engine)
    assert defaults.values == OWN | {"max_tokens": 99}
    assert defaults.max_tokens == 99
    assert defaults.params() == SamplingParams(**OWN, max_tokens=99)
    assert defaults.params(temperature=0, max_tokens=7) == SamplingParams(
        **OWN | {"temperature": 0, "max_tokens": 7}
    )
    assert "temperature=0.6, top_k=20" in defaults.told()
    assert FILE in defaults.told()


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ({}, {}),
        ({"do_sample": False}, {}),
        ({"temperature": None, "top_k": 50.0}, {"top_k": 50}),
        ({"top_k": 0, "repetition_penalty": 1}, {"top_k": 0, "repetition_penalty": 1}),
    ],
)
def test_what_is_null_or_absent_is_as_params_have_it(tmp_path: Path, content, values) -> None:
    assert read_defaults(write(tmp_path, content)).values == values


def test_nothing_is_taken_where_there_is_nothing_or_nothing_is_wanted(tmp_path: Path) -> None:
    engine = write(tmp_path / "engine", OWN)
    for defaults in (read_defaults(None), read_defaults(tmp_path), read_defaults(engine, "vllm")):
        assert defaults == SamplingDefaults()
        assert defaults.told() == ""
        assert defaults.max_tokens is None


def test_another_directory_and_what_is_over_it(tmp_path: Path) -> None:
    engine, other = write(tmp_path / "engine", OWN), write(tmp_path / "other", {"top_k": 3})
    assert read_defaults(engine, other).values == {"top_k": 3}
    assert read_defaults(engine, str(other)).values == {"top_k": 3}
    changed = read_defaults(engine, override={"temperature": 0.2, "top_p": None, "eos_token_id": 1})
    assert changed.values == {k: v for k, v in OWN.items() if k != "top_p"} | {"temperature": 0.2}
    alone = read_defaults(engine, "vllm", {"max_new_tokens": 5})
    assert alone.values == {"max_tokens": 5}
    assert "override_generation_config" in alone.told()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "0.6"}, "temperature='0.6'"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": True}, "repetition_penalty=True"),
        ({"max_new_tokens": 0}, "max_tokens=0"),
        ([], "no object"),
        ("{", "no JSON"),
    ],
)
def test_what_no_request_can_have_is_refused_with_the_way_round_it(tmp_path, content, part) -> None:
    bad = write(tmp_path / "bad", content)
    with pytest.raises(EngineError) as own:
        read_defaults(bad)
    with pytest.raises(ConfigError) as named:
        read_defaults(None, bad)
    for error in (own.value, named.value):
        assert part in error.found
        assert FILE in error.found
        assert "vllm" in error.do
    assert read_defaults(bad, "vllm") == SamplingDefaults()
    if isinstance(content, dict):
        with pytest.raises(ConfigError, match="override_generation_config"):
            read_defaults(None, override=content)


def test_a_directory_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=FILE):
        read_defaults(tmp_path, tmp_path)
