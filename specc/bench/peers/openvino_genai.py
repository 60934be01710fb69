"""OpenVINO GenAI: pipelines over stateful models, with a draft model or prompt lookup.

Source: https://github.com/openvinotoolkit/openvino.genai, docs and `py_openvino_genai.pyi`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specc.bench.peers.names import ASSISTED, LOOKUP, PLAIN
from specc.bench.peers.peer import BatchTimes, Form, Job, NotAvailableError, measurement
from specc.bench.rounds import Measurement

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoGenAI:
    """See `Peer`."""

    def convert(self, checkpoint: Path, form: Form, output: Path) -> None:
        """Write the stateful model that its pipelines read, and the tokenizer's models."""
        if form.dtype not in _PRECISIONS:
            raise NotAvailableError(
                f"specc writes it models of {' and '.join(_PRECISIONS)}, and the engine has {form}"
            )
        from specc.bench.peers.openvino_export import export

        export(checkpoint, form, output)

    def load(self, job: Job) -> _Pipelines:
        """Load a pipeline for each backend of its attention; of drafts and lookups there is one."""
        return _Pipelines(job)


PEER = OpenVinoGenAI()


class _Pipelines:
    """What it can generate with, each loaded when it is first asked for."""

    def __init__(self, job: Job) -> None:
        import openvino_genai

        self._library = openvino_genai
        self._job = job
        precision = _PRECISIONS[job.dtype]
        self._properties = {
            "INFERENCE_NUM_THREADS": job.threads,
            "NUM_STREAMS": "1",
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        self.settings: Mapping[str, Mapping[str, Any]] = _settings(job)
        self._pipelines: dict[str, Any] = {}
        for own in self.settings.values():
            self._pipeline(own["attention"])

    def run(self, setting: str) -> Measurement:
        own = dict(self.settings[setting])
        pipeline = self._pipeline(own.pop("attention"))
        outputs: list[list[int]] = []
        times = []
        begin = time.perf_counter()
        for batch in self._job.batches:
            found = pipeline.generate(_inputs(batch), self._config(own))
            outputs += [list(tokens) for tokens in found.tokens]
            times.append(_times_of(found, len(batch), self._job.mode))
        elapsed_s = time.perf_counter() - begin
        return measurement(outputs, elapsed_s, times, self._job.mode != PLAIN)

    def _pipeline(self, attention: str) -> Any:
        if attention not in self._pipelines:
            make: Callable[..., Any] = self._library.LLMPipeline
            options = {"ATTENTION_BACKEND": attention, **self._properties}
            if attention == "PA":
                options["scheduler_config"] = self._scheduler()
            if self._job.draft is not None:
                options["draft_model"] = self._library.draft_model(
                    self._job.draft, "CPU", **self._properties
                )
            if self._job.mode == LOOKUP:
                options["prompt_lookup"] = True
            self._pipelines[attention] = make(self._job.target, "CPU", **options)
        return self._pipelines[attention]

    def _scheduler(self) -> Any:
        scheduler = self._library.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = max(map(len, self._job.batches))
        # prompts in one piece, as the others have them
        scheduler.max_num_batched_tokens = max(
            2048, *(sum(map(len, batch)) for batch in self._job.batches)
        )
        return scheduler

    def _config(self, own: Mapping[str, Any]) -> Any:
        config = self._library.GenerationConfig()
        config.max_new_tokens = self._job.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        for name, value in own.items():
            setattr(config, name, value)
        return config


def _settings(job: Job) -> dict[str, dict[str, Any]]:
    if job.mode == ASSISTED:
        counts = dict.fromkeys((job.depth, 5))
        return {
            f"constant {count}": {"attention": "PA", "num_assistant_tokens": count}
            for count in counts
        }
    if job.mode == LOOKUP:
        counts = dict.fromkeys((5, 10))
        return {
            f"3-grams, {count}": {
                "attention": "PA",
                "num_assistant_tokens": count,
                "max_ngram_size": 3,
            }
            for count in counts
        }
    return {"SDPA": {"attention": "SDPA"}, "paged attention": {"attention": "PA"}}


def _inputs(batch: list[list[int]]) -> Any:
    """Token ids [B, T] with zeros on the left, and the mask of real tokens."""
    import numpy
    import openvino
    import openvino_genai

    width = max(map(len, batch))
    ids = numpy.array([[0] * (width - len(own)) + own for own in batch], dtype=numpy.int64)
    mask = numpy.array(
        [[0] * (width - len(own)) + [1] * len(own) for own in batch], dtype=numpy.int64
    )
    return openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))


def _times_of(found: Any, size: int, mode: str) -> BatchTimes:
    """What the pipeline's own metrics say of one call."""
    first_s = found.perf_metrics.get_ttft().mean / 1000
    if mode != PLAIN:
        # passes of the target, that of the prompts among them; its counter of accepted tokens
        # misses some, and which sequences took part in a pass shows where there is one alone
        passes = len(found.perf_metrics.raw_metrics.token_infer_durations)
        return BatchTimes(size, first_s, passes - 1, passes - 1 if size == 1 else None)
    steps = [len(tokens) - 1 for tokens in found.tokens]
    return BatchTimes(size, first_s, max(steps), sum(steps))
