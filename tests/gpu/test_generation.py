"""Generation beside transformers: what has run is known, whatever happens next."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import generation
from tests.gpu.results import Device, Results

PLAIN, ASSISTED = "transformers", "transformers-assisted"
OWN = ("specc, off", "specc, chain")


class Fake:
    """Decodes at a rate; `look` is called before each run."""

    def __init__(self, rate: float, look: Any = lambda: None) -> None:
        self._rate, self._look = rate, look

    def run(self) -> Any:
        self._look()
        return SimpleNamespace(
            elapsed_s=1.0,
            decode_tokens_per_s=self._rate,
            tokens_per_s=self._rate / 2,
            ms_per_step=1000 / self._rate,
            mean_acceptance_length=None,
            num_output_tokens=7,
        )


def refuse() -> Any:
    raise ValueError("vocabularies differ")


def measured(
    path: Path, patch: pytest.MonkeyPatch, makers: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Run with these contenders instead; results by name, as far as they are in the file."""
    engine = SimpleNamespace(steps={"chain": None, "off": None})
    programs = SimpleNamespace(models=[SimpleNamespace(module=None)] * 2)
    own = {name: make for name, make in makers.items() if name.startswith("specc")}
    patch.setattr(generation.replay, "compile_8b", lambda acceptance: programs)
    patch.setattr(generation, "draw_weights", lambda *_: {})
    patch.setattr(generation, "draw_prompts", lambda *_: [[1]])
    patch.setattr(generation, "make_engine_of", lambda *_: engine)
    patch.setattr(generation, "own_contenders", lambda *_: own)
    others = {name: make for name, make in makers.items() if name not in own}
    patch.setattr(generation, "baselines", lambda *_: others)
    patch.setattr(Device, "prepare", lambda self: None)
    with contextlib.suppress(KeyboardInterrupt):
        generation.measure(Results(path), Device("simulated"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line for line in lines if "name" in line}


def test_what_is_compared_with_comes_first_and_each_is_there_at_once(tmp_path, monkeypatch):
    makers = {PLAIN: lambda: Fake(40.0), ASSISTED: lambda: Fake(20.0)}
    makers |= dict.fromkeys(OWN, lambda: Fake(100.0))
    found = measured(tmp_path / "events", monkeypatch, makers)
    assert list(found) == [PLAIN, ASSISTED, *OWN]
    assert {line["state"] for line in found.values()} == {"passed"}
    ratios = [line["value"]["decode_over_transformers"] for line in found.values()]
    assert ratios == [1.0, 0.5, 2.5, 2.5]
    assert found[PLAIN]["value"]["decode_tokens_per_s"] == 40.0


def test_what_transformers_refuses_is_no_failure(tmp_path, monkeypatch):
    makers = {PLAIN: lambda: Fake(40.0), ASSISTED: refuse, OWN[0]: refuse, OWN[1]: lambda: Fake(1)}
    found = measured(tmp_path / "events", monkeypatch, makers)
    states = {name: line["state"] for name, line in found.items()}
    assert states == {PLAIN: "passed", ASSISTED: "skipped", OWN[0]: "failed", OWN[1]: "passed"}
    assert "vocabularies differ" in found[ASSISTED]["value"]
