"""Options as other programs call them: what to type instead."""

from __future__ import annotations

import re
from collections.abc import Collection

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
# a field of `SamplingParams` at the start of an error, and its value
_FIELD = re.compile(r"(\w+)=('?)(.*?)\2$", re.DOTALL)


def synonym(option: str, known: Collection[str]) -> str | None:
    """The option that another program calls `option`; None where there is none.

    Args:
        option: with its dashes.
        known: options of the command.
    """
    found = _SYNONYMS.get(option)
    return found if found in known else None


def as_option(found: str, known: Collection[str]) -> str | None:
    """`top_p=2.0` as the command line has it, `--top-p 2.0`; None where it is no such option."""
    match = _FIELD.match(found)
    option = "--" + match[1].replace("_", "-") if match else ""
    return f"{option} {match[3]}" if match and option in known else None
