"""The example's prompts to choose by have no text in common with those that figures are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.examples.head_examples import imported


def words(text: str, **_: Any) -> dict[str, list[str]]:
    """A tokenizer's shape: one token a word."""
    return {"input_ids": text.split()}


def function(name: str) -> str:
    """A function, no line of which is in another one."""
    rows = "".join(f"    {name}_{row} = a b c d e f g h\n" for row in range(4))
    return f'def {name}(value):\n    """Do {name}."""\n{rows}'


def test_prompts_that_overlap_a_known_one_are_left_out() -> None:
    with imported("head_prompts") as module:
        files = [
            module.SourceFile(f"{name}.py", "".join(function(f"{name}{i}") for i in range(20)))
            for name in ("first", "other")
        ]
        every = module.find_prompts(words, files, per_file=16)
        taken = [entry for entry in every if entry["source"] == "first.py"][5]
        elsewhere = {"prompt": "def elsewhere():\n", "source": "third.py"}
        found = module.prompts_apart(words, files, [elsewhere, taken], per_file=16)
    # prompts begin in the function before
    known = set(taken["prompt"].splitlines())
    apart = [entry for entry in every if not known & set(entry["prompt"].splitlines())]
    assert found == apart
    assert len(every) - len(found) >= 3
    assert {entry["source"] for entry in found} == {"first.py", "other.py"}


def test_known_prompts_that_a_file_does_not_have_are_passed_over() -> None:
    """As where the library is of another version of Python."""
    with imported("head_prompts") as module:
        text = "".join(function(f"first{i}") for i in range(20))
        files = [module.SourceFile("first.py", text)]
        every = module.find_prompts(words, files, per_file=16)
        gone = {"prompt": function("gone"), "source": "first.py"}
        # longer than the file
        long = {"prompt": text + "\n", "source": "first.py"}
        assert module.prompts_apart(words, files, [gone, long], per_file=16) == every
        found = module.prompts_apart(words, files, [gone, every[5]], per_file=16)
    assert every[5] not in found
    assert 0 < len(found) < len(every)


def test_prompts_of_walks_are_found_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they say afterwards would be said after minutes of texts and training."""
    with imported("head_training") as module:
        loaded = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(eval=dict))
        monkeypatch.setattr(module, "AutoTokenizer", loaded)
        monkeypatch.setattr(module, "AutoModelForCausalLM", loaded)
        asked: list[object] = []
        monkeypatch.setattr(module, "prompts_of_walks", lambda of: asked.append(of) or {"a": []})

        def load_texts(path: object) -> list[Any]:
            assert len(asked) == 1
            return []

        monkeypatch.setattr(module, "load_texts", load_texts)
        texts = SimpleNamespace(is_file=lambda: True)
        lessons = module.Lessons.find(SimpleNamespace(target="target", texts=texts))
        monkeypatch.setattr(module, "greedy_texts", lambda *given: given[2:])
        assert lessons.greedy([2, 5, 7]) == {"a": ([], [2, 5, 7])}
        assert len(asked) == 1
