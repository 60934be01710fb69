"""onnxruntime-genai: its model builder, and its generators with a draft model or n-grams.

Source: docs/speculative_decoding.md of https://github.com/microsoft/onnxruntime-genai.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.bench.peers.names import ASSISTED, LOOKUP, PLAIN
from specc.bench.peers.peer import BatchTimes, Form, Job, NotAvailableError, measurement
from specc.bench.rounds import Measurement

_CONFIG = "genai_config.json"
_PRECISIONS = {Form("float32"): "fp32", Form("float32", "int4"): "int4"}
# the most that its options take
_MOST_DRAFT_TOKENS = 16


class OnnxRuntimeGenAI:
    """See `Peer`."""

    def convert(self, checkpoint: Path, form: Form, output: Path) -> None:
        """Run the model builder that comes with the package."""
        if form not in _PRECISIONS:
            known = " and ".join(map(str, _PRECISIONS))
            raise NotAvailableError(
                f"its model builder writes {known} for CPUs, and the engine has {form}"
            )
        if not checkpoint.is_dir():
            raise NotAvailableError(f"its model builder reads directories, and {checkpoint} is not")
        with tempfile.TemporaryDirectory(dir=output.parent) as cache:
            done = subprocess.run(
                [
                    *(sys.executable, "-P", "-m", "onnxruntime_genai.models.builder"),
                    *("-i", checkpoint, "-o", output, "-c", cache),
                    *("-p", _PRECISIONS[form], "-e", "cpu"),
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
        if done.returncode or not (output / _CONFIG).is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise NotAvailableError(f"its model builder failed ({lines[-1] if lines else 'mute'})")

    def load(self, job: Job) -> _Generators:
        """Load the model, with its draft in one configuration, as the package wants it."""
        is_batched = any(len(batch) > 1 for batch in job.batches)
        if job.mode != PLAIN and is_batched:
            raise NotAvailableError("it speculates for one sequence at a time")
        return _Generators(job)


PEER = OnnxRuntimeGenAI()


class _Generators:
    """A generator for each batch, over one loaded model."""

    def __init__(self, job: Job) -> None:
        import onnxruntime_genai

        self._library = onnxruntime_genai
        self._job = job
        self.settings: Mapping[str, Mapping[str, Any]] = _settings(job)
        self._used = {token for batch in job.batches for ids in batch for token in ids}
        self._load()

    def _load(self) -> None:
        """Load the model with a token as padding that nothing has.

        Where it stands in a prompt, the library's masks see no token. It also ends outputs, which
        in this library some token has to do.
        """
        vocab_size = _read_config(Path(self._job.target))["model"]["vocab_size"]
        unused = (token for token in reversed(range(vocab_size)) if token not in self._used)
        pad = next(unused, None)
        if pad is None:
            raise NotAvailableError("prompts and outputs have all tokens, and one has to end them")
        self._pad = pad
        with tempfile.TemporaryDirectory() as directory:
            _write_config(self._job, Path(directory), pad)
            self._model = self._library.Model(self._library.Config(directory))

    def run(self, setting: str) -> Measurement:
        """Generate for all batches; again with another token at the end, if one came out."""
        while True:
            found = self._run(setting)
            emitted = {token for tokens in found.outputs for token in tokens}
            if self._pad not in emitted:
                return found
            self._used |= emitted
            self._load()

    def _run(self, setting: str) -> Measurement:
        outputs: list[list[int]] = []
        times = []
        begin = time.perf_counter()
        for batch in self._job.batches:
            found, one = self._generate(batch, self.settings[setting])
            outputs += found
            times.append(one)
        elapsed_s = time.perf_counter() - begin
        return measurement(outputs, elapsed_s, times, self._job.mode != PLAIN)

    def _generate(
        self, batch: list[list[int]], options: Mapping[str, Any]
    ) -> tuple[list[list[int]], BatchTimes]:
        import numpy

        begin = time.perf_counter()
        most = self._job.max_tokens
        width = max(map(len, batch))
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(
            do_sample=False, num_beams=1, batch_size=len(batch), max_length=width + most
        )
        if options:
            params.set_speculative_options(**options)
        generator = self._library.Generator(self._model, params)
        # on the right: its attention operator counts the tokens of a row from the left
        padded = [ids + [self._pad] * (width - len(ids)) for ids in batch]
        generator.append_tokens(numpy.array(padded, dtype=numpy.int32))
        generator.generate_next_token()
        first_s = time.perf_counter() - begin
        # what a round accepts comes out one by one, that of the prompt's pass, too
        queued = generator.get_speculative_stats()["tokens_queued"] if options else 0
        for _ in range(most - 1):
            if generator.is_done():
                break
            generator.generate_next_token()
        outputs = [
            [int(token) for token in generator.get_sequence(row)[width:]]
            for row in range(len(batch))
        ]
        steps = most - 1
        if options:
            stats = generator.get_speculative_stats()
            steps = stats["rounds"] + stats["standard_fallback_steps"] - 1
        first_tokens = max(queued, len(batch))
        return outputs, BatchTimes(len(batch), first_s, steps, steps * len(batch), first_tokens)


def _settings(job: Job) -> dict[str, dict[str, Any]]:
    depth = min(job.depth, _MOST_DRAFT_TOKENS)
    if job.mode == ASSISTED:
        return {
            f"constant {depth}": {"max_draft_tokens": depth},
            "adaptive": {"max_draft_tokens": depth, "min_adaptive_k": 2},
        }
    if job.mode == LOOKUP:
        lookup = {"ngram_size": 3, "max_draft_tokens": depth}
        return {
            f"3-grams, {depth}": lookup,
            "3-grams, chained, 8": lookup | {"max_draft_tokens": 8, "ngram_chained_lookup": True},
            "3-grams, chained, adaptive": lookup
            | {"min_adaptive_k": 2, "ngram_chained_lookup": True},
        }
    return {"default": {}}


def _write_config(job: Job, directory: Path, pad: int) -> None:
    """One configuration of target and draft, whose files are links: it refuses paths with dots."""
    config = _read_config(Path(job.target))
    model = config["model"]
    model["decoder"] = _decoder(config, job, Path(job.target), "target", directory)
    if job.draft is not None:
        draft = _read_config(Path(job.draft))
        model["draft"] = _decoder(draft, job, Path(job.draft), "draft", directory)
    model["eos_token_id"] = model["pad_token_id"] = pad
    (directory / _CONFIG).write_text(json.dumps(config))


def _decoder(
    config: dict[str, Any], job: Job, source: Path, name: str, directory: Path
) -> dict[str, Any]:
    os.symlink(source, directory / name)
    decoder = config["model"]["decoder"]
    decoder["filename"] = f"{name}/{decoder['filename']}"
    decoder["session_options"] |= {"intra_op_num_threads": job.threads, "inter_op_num_threads": 1}
    return decoder


def _read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / _CONFIG).read_text())
    return config
