"""Options as other programs call them: what to type instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from specc.errors import SpeccError

# option of vLLM, transformers or TensorRT-LLM → option of specc
_SYNONYMS = {
    "--model": "--target",
    "--model-path": "--target",
    "--speculative-model": "--draft",
    "--draft-model": "--draft",
    "--speculative-num-tokens": "--num-speculative-tokens",
    "--max-model-len": "--max-seq-len",
    "--max-batch": "--max-batch-size",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--prefill-chunk",
    "--torch-dtype": "--dtype",
    "--data-type": "--dtype",
    "--output-dir": "--output",
    "--output-directory": "--output",
}
# a field of a dataclass of options at the start of an error, and its value; without the equals
# sign the value is one word, as others are prose
_FIELD = re.compile(r"(\w+)(?:=('?)(.*?)\2| (\S+))$", re.DOTALL)


def synonym(option: str, known: Collection[str]) -> str | None:
    """The option that another program calls `option`; None where there is none.

    Args:
        option: with its dashes.
        known: options of the command.
    """
    found = _SYNONYMS.get(option)
    return found if found in known else None


def in_words_of(options: Mapping[str, str], error: SpeccError) -> SpeccError:
    """An error that names a field, as the command line has it: `top_p=2.0` is `--top-p 2.0`.

    Args:
        options: field → option of the command.
        error: any; it comes back as it is where it names no such field.
    """
    match = _FIELD.match(error.found)
    if match is None or (option := options.get(match[1])) is None:
        return error
    value = match[4] if match[3] is None else match[3]
    do = re.sub(rf"\b{match[1]}\b", option, error.do)
    return type(error)(f"{option} {value}", error.needed, do)
