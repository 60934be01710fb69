"""llama.cpp by its Python package: one greedy loop over the C library, alone or with drafts.

The library has passes and caches; loops of drafts belong to its programs. The loop here is that of
`examples/speculative-simple`: the draft proposes a chain greedily, one pass of the target verifies
it, and rows of what was rejected are removed. It decodes several sequences together, as the
library's batches do. Lookups are the package's own `LlamaPromptLookupDecoding`.

Source: https://github.com/ggml-org/llama.cpp, include/llama.h, examples/speculative-simple.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.bench.peers.names import ASSISTED, LOOKUP, PEERS, PLAIN
from specc.bench.peers.peer import BatchTimes, Form, Job, NotAvailableError, measurement
from specc.bench.rounds import Measurement

# ggml's types, of caches
_CACHE_TYPES = {"float32": 0, "bfloat16": 30}

Drafts = list[list[int]]


class LlamaCpp:
    """See `Peer`."""

    def convert(self, checkpoint: Path, form: Form, output: Path) -> None:
        """Write the GGUF file; the package comes without llama.cpp's converter."""
        if form.dtype not in _CACHE_TYPES:
            raise NotAvailableError(
                f"it is measured in {' and '.join(_CACHE_TYPES)}, and the engine has {form}"
            )
        from specc.bench.peers.gguf_export import export

        model = PEERS["llama.cpp"].model
        assert model
        export(checkpoint, form, output / model)

    def load(self, job: Job) -> _Loop:
        return _Loop(job)


PEER = LlamaCpp()


class _Loop:
    """Greedy decoding of batches, with what the mode drafts."""

    def __init__(self, job: Job) -> None:
        import llama_cpp

        self._job = job
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        self.settings: Mapping[str, Mapping[str, Any]] = _settings(job)
        most = max((own["num_tokens"] for own in self.settings.values() if own), default=0)
        self._target = _Context(job.target, job, most)
        self._draft = None if job.draft is None else _Context(job.draft, job, most)
        if self._draft is not None and self._draft.vocab_size > self._target.vocab_size:
            raise NotAvailableError(
                f"the draft has {self._draft.vocab_size} tokens, and the target"
                f" {self._target.vocab_size}"
            )

    def run(self, setting: str) -> Measurement:
        own = self.settings[setting]
        outputs: list[list[int]] = []
        times = []
        begin = time.perf_counter()
        for batch in self._job.batches:
            found, one = self._generate(batch, self._drafter(own), own.get("num_tokens", 0))
            outputs += found
            times.append(one)
        elapsed_s = time.perf_counter() - begin
        return measurement(outputs, elapsed_s, times, self._job.mode != PLAIN)

    def _drafter(self, own: Mapping[str, Any]) -> Callable[[Drafts, Sequence[int]], Drafts] | None:
        if self._draft is not None:
            return _ModelDrafter(self._draft)
        if self._job.mode == LOOKUP:
            return _Lookups(own["max_ngram_size"], own["num_tokens"])
        return None

    def _generate(
        self,
        batch: list[list[int]],
        drafter: Callable[[Drafts, Sequence[int]], Drafts] | None,
        num_drafts: int,
    ) -> tuple[list[list[int]], BatchTimes]:
        begin = time.perf_counter()
        target = self._target
        target.clear()
        texts = [list(ids) for ids in batch]
        ends = [len(ids) + self._job.max_tokens for ids in batch]
        found = target.decode([(row, 0, ids, 1) for row, ids in enumerate(texts)])
        for text, (token,) in zip(texts, found, strict=True):
            text.append(token)
        first_s = time.perf_counter() - begin
        steps = request_steps = 0
        while rows := [row for row, text in enumerate(texts) if len(text) < ends[row]]:
            drafts: Drafts = [[] for _ in texts]
            if drafter is not None:
                # one more token comes with each pass, so the last one needs no draft
                room = [
                    min(num_drafts, ends[row] - len(texts[row]) - 1) for row in range(len(texts))
                ]
                drafts = drafter(texts, room)
            passed = [
                (row, len(texts[row]) - 1, [texts[row][-1], *drafts[row]], 1 + len(drafts[row]))
                for row in rows
            ]
            for row, choices in zip(rows, target.decode(passed), strict=True):
                own = drafts[row]
                kept = next((i for i, t in enumerate(own) if t != choices[i]), len(own))
                texts[row] += choices[: kept + 1]
                if kept < len(own):
                    target.cut(row, len(texts[row]) - 1)
            steps += 1
            request_steps += len(rows)
        outputs = [text[len(ids) :] for text, ids in zip(texts, batch, strict=True)]
        return outputs, BatchTimes(len(batch), first_s, steps, request_steps)


def _settings(job: Job) -> dict[str, dict[str, Any]]:
    if job.mode == ASSISTED:
        # 3 is what its programs take unless told otherwise
        return {f"constant {n}": {"num_tokens": n} for n in dict.fromkeys((job.depth, 3))}
    if job.mode == LOOKUP:
        return {
            f"2-grams, {n}": {"num_tokens": n, "max_ngram_size": 2}
            for n in dict.fromkeys((job.depth, 10))
        }
    return {"default": {}}


class _ModelDrafter:
    """Chains of a draft model, all sequences in one pass; its rows follow what was accepted."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._fed: list[list[int]] = []
        self._agreed: list[int] = []
        context.clear()

    def __call__(self, texts: Drafts, room: Sequence[int]) -> Drafts:
        """A chain of at most `room` tokens after each text."""
        if not self._fed:
            self._fed, self._agreed = [[] for _ in texts], [0] * len(texts)
        drafts: Drafts = [[] for _ in texts]
        rows = [row for row, most in enumerate(room) if most > 0]
        for row in rows:
            text, fed = texts[row], self._fed[row]
            # what was the same before still is
            length = self._agreed[row]
            while length < min(len(fed), len(text)) and fed[length] == text[length]:
                length += 1
            self._agreed[row] = length
            if length < len(fed):
                self._context.cut(row, length)
                del fed[length:]
        while rows:
            passed = []
            for row in rows:
                fed = self._fed[row]
                new = [*texts[row], *drafts[row]][len(fed) :]
                passed.append((row, len(fed), new, 1))
                fed += new
            for row, (token,) in zip(rows, self._context.decode(passed), strict=True):
                drafts[row].append(token)
            rows = [row for row in rows if len(drafts[row]) < room[row]]
        return drafts


class _Lookups:
    """Chains that the package finds in the text itself."""

    def __init__(self, max_ngram_size: int, num_tokens: int) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._find = LlamaPromptLookupDecoding(max_ngram_size, num_tokens)

    def __call__(self, texts: Drafts, room: Sequence[int]) -> Drafts:
        import numpy

        found: Drafts = []
        for text, most in zip(texts, room, strict=True):
            chain = self._find(numpy.array(text, dtype=numpy.intc)) if most > 0 else ()
            found.append([int(token) for token in chain[:most]])
        return found


class _Context:
    """A model and its cache of rows, a sequence for each prompt of a batch."""

    def __init__(self, path: str, job: Job, num_drafts: int) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self._model:
            raise NotAvailableError(f"it cannot load {path}")
        size = max(map(len, job.batches))
        prompts = max(sum(map(len, batch)) for batch in job.batches)
        # a draft sees prompts together with the first token of the target
        self._most = max(prompts + size, size * (1 + num_drafts))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = size
        # its caches of sequences have blocks of 256 rows
        params.n_ctx = size * (-(-(job.longest + num_drafts) // 256) * 256)
        params.n_batch = self._most
        params.n_ubatch = min(self._most, 512)
        params.n_threads = params.n_threads_batch = job.threads
        params.type_k = params.type_v = _CACHE_TYPES[job.dtype]
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise NotAvailableError(f"it cannot make a context of {params.n_ctx} rows for {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(self._most, 0, 1)

    def decode(self, passed: Sequence[tuple[int, int, Sequence[int], int]]) -> list[list[int]]:
        """One pass; of each sequence, the likeliest token after its last ones.

        Args:
            passed: of each sequence its number, the position of its first token, its tokens, and
                after how many of the last of them a choice is wanted.
        """
        import numpy

        batch, place = self._batch, 0
        for row, first, tokens, num_wanted in passed:
            begin = len(tokens) - num_wanted
            for number, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = first + number
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = row
                batch.logits[place] = number >= begin
                place += 1
        batch.n_tokens = place
        if code := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {place} tokens")
        counts = [num_wanted for *_, num_wanted in passed]
        logits = self._library.llama_get_logits(self._context)
        shape = (sum(counts), self.vocab_size)
        best = numpy.ctypeslib.as_array(logits, shape=shape).argmax(1).tolist()
        result, place = [], 0
        for count in counts:
            result.append(best[place : place + count])
            place += count
        return result

    def cut(self, row: int, length: int) -> None:
        """Remove the rows of a sequence from a position on.

        Raises:
            NotAvailableError: layers that keep states cannot go back.
        """
        if not self._library.llama_memory_seq_rm(self._memory, row, length, -1):
            raise NotAvailableError(
                "llama.cpp keeps no earlier states of this model, and some drafts are rejected"
            )

    def clear(self) -> None:
        """Remove all rows."""
        self._library.llama_memory_clear(self._memory, False)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, data: Any) -> None:
    """Its log tells every tensor."""
