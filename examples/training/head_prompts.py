"""Prompts by which runs of training are compared, apart from those that figures are stated of."""

from __future__ import annotations

from collections.abc import Sequence

from pair_data import SourceFile, find_prompts
from transformers import PreTrainedTokenizerFast

_PER_FILE = 16


def prompts_apart(
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[SourceFile],
    known: Sequence[dict[str, str]],
    per_file: int = _PER_FILE,
) -> list[dict[str, str]]:
    """Prompts of files, none of which has text in common with known ones.

    Args:
        tokenizer: counts a prompt's tokens.
        files: that prompts are cut from.
        known: prompts to stay apart from; those of other files do not matter, nor those that
            their file does not have word for word, as in another version of Python.
        per_file: prompts of a file, at most.
    Returns:
        what `find_prompts` finds, less the prompts that overlap a known one where it stands in its
        file.
    """
    texts = {file.name: file.text for file in files}

    def span(entry: dict[str, str]) -> tuple[int, int]:
        begin = texts[entry["source"]].find(entry["prompt"])
        return begin, begin + len(entry["prompt"])

    spans = [(entry["source"], *span(entry)) for entry in known if entry["source"] in texts]
    taken = [(name, first, last) for name, first, last in spans if first >= 0]
    found = []
    for entry in find_prompts(tokenizer, list(files), per_file=per_file):
        begin, end = span(entry)
        if all(
            name != entry["source"] or end <= first or begin >= last for name, first, last in taken
        ):
            found.append(entry)
    return found
