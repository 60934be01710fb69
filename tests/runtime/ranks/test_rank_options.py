"""Numbers of ranks and seconds that cannot be, and engines that have no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.errors import ConfigError
from specc.runtime.engine import Engine
from specc.runtime.ranks.led_model import LedModel
from specc.runtime.ranks.rank_options import RankOptions


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"num_ranks": 0}, "0 ranks"),
        ({"num_ranks": True}, "True ranks"),
        ({"num_ranks": 2.0}, "2.0 ranks"),
        ({"num_ranks": 2, "timeout_s": 0}, "timeout_s 0"),
        ({"num_ranks": 2, "timeout_s": float("nan")}, "timeout_s nan"),
        ({"num_ranks": 2, "start_timeout_s": -1}, "start_timeout_s -1"),
        ({"num_ranks": 2, "draft_ranks": 2}, "drafts on 2 ranks"),
    ],
)
def test_numbers_that_cannot_be(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RankOptions(**options)
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("timeout_s", "silence_s"), [(1.5, 1.5), (7.0, 7.0), (30.0, 7.0), (60.0, 12.0)]
)
def test_silence_is_noticed_before_a_long_pass_is(timeout_s: float, silence_s: float) -> None:
    """By default, a job with a rank that stands still is over within 10 s."""
    assert RankOptions(2, timeout_s=timeout_s).silence_s == silence_s


def test_one_rank_is_led_by_nobody(engine_path: Path) -> None:
    engine = Engine.load(engine_path, ranks=RankOptions(1))
    assert not isinstance(engine.target, LedModel)


def test_only_programs_of_flat_tokens_have_ranks(engine_path: Path) -> None:
    from specc.runtime.ranks.launch import _check_backend

    manifest = read_manifest(engine_path)
    _check_backend(manifest, "cpu")
    _check_backend(manifest, "eager")
    with pytest.raises(ConfigError, match="several ranks of an engine of the backend onnx") as told:
        _check_backend(manifest, "onnx")
    assert told.value.do == "run it with one rank, or compile it for one of them"
