r"""Perplexity and KL divergence of one model in several quantizations, llama.cpp's beside specc's.

All read the same windows of the same texts, window by window; the reference is the engine in
float32, which reads each window once. llama.cpp's files are written by its own quantizer from the
numbers of FILE (`llama_model_quantize`, package llama-cpp-python).

    python -m tests.measure.compare_quantizations T/ --file FILE.gguf --texts texts.jsonl \
        --calibration other.jsonl --folder engines/ --windows 98 --json out.json

Engines that FOLDER has already are taken as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specc
from specc.bench.text_scores import Scored, ScoredEngine, TextScores, score_texts, windows_of
from specc.cli.prompts import plain_prompts
from specc.runtime.engine import Engine
from specc.system.machine import describe_machine
from tests.measure.gguf_quantizer import quantize

CONTEXT = 512
# name → options; what is compiled of the file has none
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "the file": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4, calibrated": {"quantize": "int4", "calibration": ""},
    "q4_0": {"quantize": "q4_0"},
    "q4_k_m": {"quantize": "q4_k_m"},
}
MIXES = ("Q4_0", "Q4_K_M")


class Kept:
    """A model whose logits of one window are kept, for all that are compared with it."""

    def __init__(self, model: Scored) -> None:
        self._model, self._rows = model, dict[int, Tensor]()
        self.vocab_size = model.vocab_size

    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        if start not in self._rows:
            self._rows[start] = self._model.read(tokens, start)
        return self._rows[start]

    def forget(self) -> None:
        self._rows.clear()


class LlamaCpp:
    """A GGUF file in llama.cpp, one thread a core."""

    def __init__(self, file: Path, num_threads: int) -> None:
        import llama_cpp

        sizes = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_threads": num_threads}
        self._model = llama_cpp.Llama(
            str(file), n_threads_batch=num_threads, logits_all=True, verbose=False, **sizes
        )
        self.vocab_size = self._model.n_vocab()

    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        if start == 0:
            self._model.reset()
        self._model.eval(list(tokens))
        rows = self._model.scores[start : start + len(tokens)]
        return torch.from_numpy(rows.copy()).float()


def compiled(name: str, options: argparse.Namespace) -> Path:
    """The engine of a name, made if need be."""
    path: Path = options.folder / name.replace(" ", "-").replace(",", "")
    if not (path / "manifest.json").is_file():
        given = dict(ENGINES[name])
        if "calibration" in given:
            given["calibration"] = str(options.calibration)
        source = options.file if name == "the file" else options.target
        begin = time.perf_counter()
        # a pass that is scored has as many tokens as a step has nodes
        sizes = {"max_seq_len": CONTEXT, "max_batch_size": 2, "prefill_chunk": 64}
        sizes |= {"num_speculative_tokens": 31}
        specc.compile(source, "suffix", path, probe=False, **sizes, **given)
        print(f"compiled {name} in {time.perf_counter() - begin:.0f} s", flush=True)
    return path


def added(sums: TextScores | None, more: TextScores) -> TextScores:
    """Of all windows until now."""
    if sums is None:
        return more
    return TextScores(
        *(getattr(sums, x) + getattr(more, x) for x in TextScores.__dataclass_fields__)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--names", nargs="*", default=list(ENGINES))
    parser.add_argument("--mixes", nargs="*", default=list(MIXES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    threads = {"num_threads": options.threads}
    # the reference is first
    names = list(dict.fromkeys(["float32", *options.names]))
    engines = {name: Engine.load(compiled(name, options), **threads) for name in names}
    contenders: dict[str, Scored] = {name: ScoredEngine(x) for name, x in engines.items()}
    sizes = {name: weight_bytes(compiled(name, options)) for name in names}
    for mix in options.mixes:
        file = options.folder / f"{mix}.gguf"
        if not file.is_file():
            quantize(options.file, mix, file)
        contenders[f"llama.cpp {mix}"] = LlamaCpp(file, options.threads)
        sizes[f"llama.cpp {mix}"] = file.stat().st_size
    contenders["llama.cpp, the file"] = LlamaCpp(options.file, options.threads)
    sizes["llama.cpp, the file"] = options.file.stat().st_size
    first = next(iter(engines.values()))
    assert first.tokenizer is not None
    ids = [
        first.tokenizer.encode(text, add_special_tokens=False).ids
        for text in plain_prompts(options.texts)
        if isinstance(text, str)
    ]
    begin = first.bos_token_id if first.add_bos else None
    windows = list(itertools.islice(windows_of(ids, CONTEXT, begin), options.windows))
    reference = Kept(contenders["float32"])
    sums: dict[str, TextScores] = {}
    for number, window in enumerate(windows, start=1):
        for name, model in contenders.items():
            other = None if name == "float32" else reference
            own = reference if name == "float32" else model
            scores = score_texts(own, [window], other, lambda *done: None)
            sums[name] = added(sums.get(name), scores)
        reference.forget()
        rows = [
            {"name": name, "bytes": sizes[name], **scores.to_json()}
            for name, scores in sums.items()
        ]
        if options.json:
            report = {"machine": describe_machine(), "context": CONTEXT, "rows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if number % 8 == 0 or number == len(windows):
            said = ", ".join(f"{row['name']} {row['perplexity']:.3f}" for row in rows)
            print(
                f"{number}/{len(windows)} windows, {rows[0]['tokens']} tokens: {said}", flush=True
            )


def weight_bytes(engine: Path) -> int:
    return (engine / "target" / "weights.safetensors").stat().st_size


if __name__ == "__main__":
    main()
