"""The baseline: greedy `generate` of transformers, plain, assisted and with lookups."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specc.bench.rounds import Measurement

PLAIN = "transformers"
ASSISTED = "transformers-assisted"
STATIC = "transformers-compiled"
# a pair that is refused; torch.compile, graphs (which assert what they assume), lack of memory
_FAILURES = (ValueError, RuntimeError, AssertionError)


class TransformersContender:
    """`generate` with a fixed number of new tokens; end-of-sequence tokens do not end it.

    Args:
        batches: token ids of prompts, by batch; shorter prompts are padded on the left.
        max_tokens: output tokens of each prompt.
        assistant: draft model of assisted generation.
        settings: fields of the draft's generation configuration; empty are the defaults.
        options: fields of the target's generation configuration.
        processors: of logits, as `generate` takes them.
    """

    plan: str | None = None

    def __init__(
        self,
        name: str,
        model: Any,
        batches: Sequence[Sequence[list[int]]],
        max_tokens: int,
        assistant: Any = None,
        settings: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        processors: Sequence[Any] = (),
    ) -> None:
        self.name = name
        self._processors = list(processors)
        self.settings = settings or {}
        self._generation = options or {}
        self._model = model
        self._assistant = assistant
        self._max_tokens = max_tokens
        device = model.device
        padded = [_pad(batch) for batch in batches]
        self._batches = [
            (len(batch), token_ids.to(device), mask.to(device))
            for batch, (token_ids, mask) in zip(batches, padded, strict=True)
        ]

    def run(self) -> Measurement:
        self._configure()
        outputs: list[list[int]] = []
        clocks = []
        begin = time.perf_counter()
        for _, token_ids, mask in self._batches:
            clock = _Clock()
            options = {"assistant_model": self._assistant} if self._assistant is not None else {}
            if self._processors:
                options["logits_processor"] = self._processors
            with torch.inference_mode():
                found = self._model.generate(
                    token_ids, attention_mask=mask, streamer=clock, **options
                )
            outputs += found[:, token_ids.shape[1] :].tolist()
            clocks.append(clock)
        elapsed_s = time.perf_counter() - begin
        sizes = [size for size, *_ in self._batches]
        num_passes = sum(len(clock.counts) for clock in clocks)
        num_tokens = sum(map(len, outputs))
        drafts = self._assistant is not None or "prompt_lookup_num_tokens" in self._generation
        return Measurement(
            outputs=outputs,
            elapsed_s=elapsed_s,
            first_token_s=statistics.mean(
                clock.first_s
                for clock, size in zip(clocks, sizes, strict=True)
                for _ in range(size)
            ),
            decode_s=elapsed_s - sum(clock.first_s for clock in clocks),
            num_decode_tokens=num_tokens - sum(clock.counts[0] for clock in clocks),
            num_steps=num_passes - len(clocks),
            num_request_steps=sum(
                size * (len(clock.counts) - 1) for clock, size in zip(clocks, sizes, strict=True)
            ),
            # its pass over the prompt verifies a draft too
            mean_acceptance_length=num_tokens / num_passes if drafts else None,
            drafts=drafts,
        )

    def _configure(self) -> None:
        """Give the models a greedy configuration; what their checkpoints suggest is dropped."""
        from transformers import GenerationConfig

        shared = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        self._model.generation_config = GenerationConfig(
            max_new_tokens=self._max_tokens, **shared, **self._generation
        )
        if self._assistant is not None:
            self._assistant.generation_config = GenerationConfig(**shared, **self.settings)


class _Clock:
    """Notes when tokens come: transformers gives a streamer the prompt, then each pass's tokens."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.first_s = 0.0
        self._begin = time.perf_counter()
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if not self.counts:
            self.first_s = time.perf_counter() - self._begin
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


ONE_SEQUENCE = "it decodes one sequence at a time"


def make_contenders(
    target: Any,
    draft: Any,
    batches: Sequence[Sequence[list[int]]],
    max_tokens: int,
    depth: int,
) -> tuple[list[TransformersContender], list[str]]:
    """Contenders of modules that are loaded already; each has run once where that compiles.

    Args:
        draft: the assistant; None leaves assisted generation out.
        batches: token ids of prompts, by batch.
        max_tokens: output tokens of each prompt.
        depth: draft tokens of the plan; 0 leaves assisted generation out.
    Returns:
        plain generation, assisted where possible, and on a GPU the compiled one with a static
        cache; notes on what was left out. One that fails is left out, too.
    """
    quieten()
    found = [TransformersContender(PLAIN, target, batches, max_tokens)]
    notes: list[str] = []

    def add(contender: TransformersContender) -> None:
        if (failure := _try(contender, target)) is None:
            found.append(contender)
        else:
            notes.append(failure)

    if draft is not None and depth:
        assisted = TransformersContender(
            ASSISTED, target, batches, max_tokens, draft, constant_draft(depth)
        )
        if any(len(batch) > 1 for batch in batches):
            notes.append(f"{ASSISTED} is left out: {ONE_SEQUENCE}")
        else:
            add(assisted)
    if target.device.type == "cuda":
        static = TransformersContender(
            STATIC, target, batches, max_tokens, options=static_cache_options()
        )
        add(static)
    else:
        notes.append(f"{STATIC} is left out: its graphs need a GPU")
    return found, notes


def static_cache_options(backend: str = "inductor", everywhere: bool = False) -> dict[str, Any]:
    """What makes `generate` decode with a static cache and a compiled forward.

    Args:
        everywhere: compile on a CPU, too, where transformers would not.
    """
    from transformers import CompileConfig

    mode = "reduce-overhead" if backend == "inductor" else None
    config = CompileConfig(backend=backend, mode=mode)  # type: ignore[arg-type]
    config._compile_all_devices = everywhere  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}


def constant_draft(depth: int) -> dict[str, Any]:
    """Settings of a draft that always proposes this many tokens."""
    return {
        "num_assistant_tokens": depth,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _try(contender: TransformersContender, target: Any) -> str | None:
    """Run once, which compiles and warms up; returns why it is to be left out, if it failed."""
    try:
        contender.run()
    except _FAILURES as error:
        failure = _left_out(contender.name, error)
    else:
        return None
    # here, the error and with it the frames that hold tensors are gone
    _free(target)
    return failure


def _left_out(name: str, error: BaseException) -> str:
    """A note with the first line of an error."""
    kind = type(error).__name__
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, ValueError):
        # some pairs it refuses, for example by vocabulary size
        return f"{name} is left out: transformers refuses it ({reason or kind})"
    return f"{name} is left out: it failed ({kind}: {reason.strip()})"


def _free(model: Any) -> None:
    """Give back what a failed run holds: compiled code, its graphs, and cached memory."""
    vars(model).pop("_compiled_call", None)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def quieten() -> None:
    """No warnings and no bars of transformers between the lines of a benchmark."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _pad(batch: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with zeros on the left, and the mask of real tokens."""
    length = max(map(len, batch))
    padded = [[0] * (length - len(ids)) + ids for ids in batch]
    mask = [[0] * (length - len(ids)) + [1] * len(ids) for ids in batch]
    return torch.tensor(padded), torch.tensor(mask)
