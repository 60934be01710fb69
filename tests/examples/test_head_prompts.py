"""The example's prompts to choose by have no text in common with those that figures are of."""

from __future__ import annotations

from typing import Any

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
