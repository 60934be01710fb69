"""What llama.cpp's converter writes of tiny models, number by number.

    python -m tests.measure.record_gguf --llama-cpp DIR [NAME …]

Every parameter of a tiny model of transformers is filled with multiples of 4, counted on, and
`convert_hf_to_gguf.py` of a source tree of llama.cpp converts it: each number of the file says
which item of which parameter it is, and what was added to it. That, and the file's fields, become
`tests/passes/frontend/gguf_recordings.json`, of which tests write files of other numbers
(`tests/passes/frontend/gguf_recordings.py`). The converter needs what its requirements name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import models
from tests.measure.gguf_cases import CASES, OPTIONS, RENAMED
from tests.passes.frontend.gguf_recordings import FILE

_STEP = 4
_LOGARITHM = "A_log"  # end of a parameter's name


def number(model: Any) -> dict[str, tuple[int, int]]:
    """Fill parameters and stored buffers with numbers; name → the first one / 4, and how many."""
    places: dict[str, tuple[int, int]] = {}
    base, seen = 1, set()
    items = model.state_dict(keep_vars=True).items()
    # numbers whose logarithm is a parameter are small, so that float32 tells them apart
    for name, value in sorted(items, key=lambda item: not item[0].endswith(_LOGARITHM)):
        if value.data_ptr() in seen or not value.is_floating_point():
            continue
        seen.add(value.data_ptr())
        count = value.numel()
        numbers = torch.arange(base, base + count, dtype=torch.float64) * _STEP
        if name.endswith(_LOGARITHM):
            numbers = numbers.log()
        with torch.no_grad():
            value.copy_(numbers.view(value.shape).float())
        places[name] = (base, count)
        base += count
    assert base * _STEP < 1 << 24, "numbers that are no float32"
    return places


def describe(values: np.ndarray, places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Which numbers of which parameters a tensor is; its values where it is of none."""
    flat = values.astype(np.float64).ravel()
    found: dict[str, Any] = {"shape": list(values.shape)}
    if (flat < 0).all() and np.allclose(-flat, np.rint(-flat), rtol=1e-5):
        flat, found["is_minus_exp"] = np.rint(-flat), True
    plus = flat % _STEP
    names, last = list(places), sum(places[list(places)[-1]])
    index = ((flat - plus) / _STEP).astype(np.int64)
    if (
        not (plus == plus[0]).all()
        or plus[0] not in (0, 1)
        or index.min() < 1
        or index.max() >= last
    ):
        return found | {"values": flat.tolist()}
    owners = np.searchsorted([places[name][0] for name in names], index, side="right") - 1
    made = []
    for part in np.split(np.arange(len(index)), np.nonzero(np.diff(owners))[0] + 1):
        name = names[owners[part[0]]]
        base, count = places[name]
        if len(part) == count and (np.diff(index[part]) == 1).all() and index[part[0]] == base:
            made.append([name])
            continue
        made += [[name, *piece] for piece in _pieces(index[part] - base, values.shape[-1])]
    return found | {"of": made} | ({"plus": float(plus[0])} if plus[0] else {})


def _pieces(index: np.ndarray, width: int) -> list[tuple[int, list[list[int]]]]:
    """Numbers as strided pieces: start, and count and stride of nested loops.

    Args:
        index: the numbers.
        width: of a row, which no piece begins or ends in.
    """
    runs: list[tuple[int, list[list[int]]]] = []
    for row in np.split(index, range(width, len(index), width)):
        steps = np.diff(row)
        if len(row) > 1 and (steps == steps[0]).all():
            runs.append((int(row[0]), [[len(row), int(steps[0])]]))
        else:
            parts = np.split(row, np.nonzero(steps != 1)[0] + 1)
            runs += [(int(part[0]), [[len(part), 1]]) for part in parts]
    while True:
        merged: list[tuple[int, list[list[int]]]] = []
        first = 0
        while first < len(runs):
            start, loops = runs[first]
            step, last = 0, first
            while last + 1 < len(runs) and runs[last + 1][1] == loops:
                own = runs[last + 1][0] - runs[last][0]
                if last > first and own != step:
                    break
                step, last = own, last + 1
            count = last - first + 1
            merged.append((start, [[count, step], *loops] if count > 1 else loops))
            first = last + 1
        if len(merged) == len(runs):
            return runs
        runs = merged


def rename(directory: Path, *names: str) -> None:
    """Rename tensors of a checkpoint, by a pattern and what takes its place."""
    file = directory / "model.safetensors"
    if names:
        save_file(
            {re.sub(*names, key): value for key, value in load_file(file).items()}, file,
            {"format": "pt"},
        )  # fmt: skip


def convert(
    directory: Path, output: Path, more: Mapping[str, Any], options: Mapping[str, bool]
) -> None:
    """Write a GGUF file of a checkpoint, with the byte tokens of the tests.

    Args:
        directory: of the checkpoint.
        output: the file.
        more: keys of the configuration that transformers has dropped.
        options: of the converter.
    """
    import gguf

    conversion, base = (importlib.import_module(f"conversion{part}") for part in ("", ".base"))
    hparams = base.ModelBase.load_hparams(directory, False) | more
    hparams = {key: value for key, value in hparams.items() if key not in more or value is not None}
    architecture = base.get_model_architecture(hparams, base.ModelType.TEXT)
    kind = conversion.get_model_class(architecture)
    _give_tokens(base.TextModel)
    kind.no_mtp = True
    if hasattr(kind, "_stack_qk_norm"):
        _yield_what_it_returns(kind)
    with torch.inference_mode():
        form = gguf.LlamaFileType.ALL_F32
        kind(directory, form, output, eager=True, hparams=hparams, **options).write()


def _give_tokens(kind: Any) -> None:
    found = models.byte_tokenizer().get_vocab()
    tokens = sorted(found, key=lambda token: found[token])
    # llama.cpp wants a pair
    tokens[-1] = tokens[0] + tokens[1]

    def set_vocab(self: Any) -> None:
        writer = self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
        writer.add_add_bos_token(False)

    kind.set_vocab = set_vocab
    for other in kind.__subclasses__():
        _give_tokens(other)


def _yield_what_it_returns(kind: Any) -> None:
    """Of StableLM, a generator that returns stacked norms, which it has to yield."""
    as_written = kind.modify_tensors

    def modify_tensors(self: Any, *given: Any) -> Any:
        found = yield from as_written(self, *given)
        yield from found or ()

    kind.modify_tensors = modify_tensors


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Fields of the model, and its tensors, by gguf-py."""
    import gguf

    reader = gguf.GGUFReader(str(path))
    fields = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith(("GGUF.", "tokenizer.", "general.")) or key.endswith(".architecture")
    }
    tensors = {t.name: np.array(t.data).reshape(t.shape.tolist()[::-1]) for t in reader.tensors}
    return fields, tensors


def record(name: str) -> dict[str, Any]:
    """What is kept of one model."""
    from transformers import AutoModelForCausalLM

    base, changes, more = CASES[name]
    config = models.tiny_config(base, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    places = number(model)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "model")
        rename(root / "model", *RENAMED.get(name, ()))
        models.byte_tokenizer().save(str(root / "model" / "tokenizer.json"))
        convert(root / "model", root / "model.gguf", more, OPTIONS.get(name, {}))
        fields, tensors = read(root / "model.gguf")
    said = {key: describe(value, places) for key, value in tensors.items()}
    for key in [key for key in fields if key.startswith("xielu.")]:
        fields[key] = describe(np.array(fields[key]), places)
    return {"config": [base, changes], "fields": fields, "tensors": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in options.names or CASES:
        known[name] = record(name)
        print(name, known[name]["fields"]["general.architecture"], flush=True)
    lines = (
        f'"{name}": {json.dumps(known[name], separators=(",", ":"))}'
        for name in CASES
        if name in known
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
