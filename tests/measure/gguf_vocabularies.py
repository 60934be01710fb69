"""llama.cpp's vectors of tokenizers, by the tokenizers that specc makes of its vocabularies.

    python tests/measure/gguf_vocabularies.py llama.cpp/models [--json FILE]

The directory has `ggml-vocab-NAME.gguf`, and of most of them `….gguf.inp`, texts, and `….gguf.out`,
their ids: those of llama.cpp's source distribution, which that of llama-cpp-python has, too. Prints
how many texts become these ids, how many ids become their texts again, and how many texts come out
of the incremental detokenizer, one token after the other, as of decoding all at once. `composed`
are texts whose ids are others, and are the expected ones without Unicode's form NFC.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, normalizers

from specc.artifact.decoders.gguf import model_name
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.errors import SpeccError
from specc.passes.frontend.gguf_tokenizer import tokenizer_of
from specc.runtime.outputs.detokenizer import Detokenizer

_BETWEEN = "\n__ggml_vocab_test__\n"
_BEFORE, _AFTER = "ggml-vocab-", ".gguf"


@dataclass(frozen=True)
class Row:
    """What became of one vocabulary; `refused` is the error, and then nothing else is."""

    vocabulary: str
    model: str
    split: str
    vectors: int = 0
    encoded: int = 0
    composed: int = 0
    decoded: int = 0
    streamed: int = 0
    refused: str = ""


def _vectors(file: Path) -> list[tuple[str, list[int]]]:
    texts = file.with_name(f"{file.name}.inp")
    if not texts.is_file():
        return []
    ids = file.with_name(f"{file.name}.out").read_text().splitlines()
    # a separator ends some files, and stands between texts alone in others
    parts = texts.read_bytes().decode().split(_BETWEEN)[: len(ids)]
    return [
        (text, [int(item) for item in line.split()]) for text, line in zip(parts, ids, strict=True)
    ]


def _streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer, text = Detokenizer(tokenizer, []), ""
    for number in ids:
        detokenizer.push(number)
        text += detokenizer.take_delta(is_final=False)
    detokenizer.flush()
    return text + detokenizer.take_delta(is_final=True)


def compare(file: Path) -> Row:
    """One vocabulary and its vectors."""
    name = file.name.removeprefix(_BEFORE).removesuffix(_AFTER)
    reader = GGUFReader(file, model_name, reads_lists=True)
    fields = reader.fields
    reader.close()
    model, split = (str(fields.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_of(fields, file.name))
    except SpeccError as error:
        return Row(name, model, split, refused=error.found)
    vectors = _vectors(file)
    encoded = composed = decoded = streamed = 0
    plain = tokenizer
    if isinstance(tokenizer.normalizer, normalizers.NFC):
        data = json.loads(tokenizer.to_str())
        plain = Tokenizer.from_str(json.dumps(data | {"normalizer": None}))
    for text, want in vectors:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        encoded += ids == want
        without = plain.encode(text, add_special_tokens=False).ids
        composed += ids != want and without == want
        decoded += whole in (text, unicodedata.normalize("NFC", text))
        streamed += _streamed(tokenizer, ids) == whole
    return Row(name, model, split, len(vectors), encoded, composed, decoded, streamed)


def table(rows: list[Row]) -> str:
    """For a page."""
    lines = ["| vocabulary | model | pre | vectors | encoded | decoded | streamed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        start = f"| {row.vocabulary} | `{row.model}` | {row.split or '–'} |"
        more = f" + {row.composed} composed" if row.composed else ""
        cells = f" {row.vectors} | {row.encoded}{more} | {row.decoded} | {row.streamed} |"
        lines.append(start + (" refused | | | |" if row.refused else cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [compare(file) for file in sorted(args.directory.glob(f"{_BEFORE}*{_AFTER}"))]
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
