"""What models think of texts: perplexity, and how far two models are from each other.

Texts are cut into windows, each of which begins anew; every token of a window but its first is
scored. Of two models the other one's distribution P is the reference for Q, that of the first:
KL(P ‖ Q) = Σ P · (log P - log Q), in nats.

Source: perplexity over windows and KL divergence as of llama.cpp's `llama-perplexity`, which
scores the second half of each window alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specc.errors import ConfigError, RequestError
from specc.runtime.engine import Engine
from specc.runtime.execution.pass_inputs import PassInputs
from specc.runtime.execution.state_rows import states_of_one

# most likely tokens whose overlap is counted
TOP = 10
# rows whose logits of both models are kept at one time
_ROWS_AT_ONCE = 64
# called with the number of windows that are done, and of all
Progress = Callable[[int, int], object]


class Scored(Protocol):
    """A model that reads windows of token ids."""

    @property
    def vocab_size(self) -> int: ...

    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        """Logits [n, V] float32 on the host of what follows each of n tokens.

        Args:
            tokens: that follow those of the earlier calls since start was 0.
            start: position of the first one; 0 begins a window.
        """
        ...


class ScoredEngine:
    """The target of an engine.

    Args:
        engine: loaded; nothing else runs in it.
    Raises:
        RequestError: its passes have no logits of every token.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.facts.scores_prompts:
            raise RequestError(
                f"texts to score, and an engine of the backend {engine.backend}",
                "passes with logits of every token: its own have a row for each request",
                "pass --backend eager, or an engine of another backend",
            )
        self._engine = engine
        shape = engine.cache.shape
        # logits of a pass take no more memory than those of the largest step
        self._most = max(1, min(engine.prefill_chunk, shape.max_num_seqs * shape.max_nodes))
        self._blocks = torch.arange(shape.blocks_per_sequence, dtype=torch.int32)[None]

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        """See `Scored.read`."""
        parts = []
        for first in range(0, len(tokens), self._most):
            own = tokens[first : first + self._most]
            parts.append(self._pass(own, start + first))
        return torch.cat(parts)

    @torch.inference_mode()
    def _pass(self, tokens: Sequence[int], start: int) -> Tensor:
        count, link = len(tokens), self._engine.link
        positions = torch.arange(start, start + count)
        inputs = PassInputs(
            torch.tensor(tokens),
            positions,
            torch.arange(count),
            torch.zeros(0, dtype=torch.int64),
            torch.tensor([0, count], dtype=torch.int32),
            positions.int(),
            torch.tensor([start], dtype=torch.int32),
            self._blocks,
            *states_of_one(self._engine.cache.states, count),
        )
        with link.active():
            sent = PassInputs(*link.send(inputs))
            logits = self._engine.target(*sent.of_model(self._engine.cache.states is not None))
            return logits.float().cpu()


class ScoredCheckpoint:
    """A checkpoint, run by transformers in float32.

    Args:
        directory: in Hugging Face's format.
    Raises:
        ConfigError: transformers does not load it.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        from specc.bench.baseline import quieten

        quieten()
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        except (OSError, ValueError, ImportError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            raise ConfigError(
                f"{directory}: transformers does not load it ({reason or type(error).__name__})",
                "an engine, or a checkpoint of a causal language model",
                "compile it without --quantize and pass that engine",
            ) from error
        self._model.eval()
        self._rows: Any = None

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        """See `Scored.read`."""
        if start == 0:
            self._rows = None
        given = torch.tensor([list(tokens)])
        found = self._model(input_ids=given, past_key_values=self._rows, use_cache=True)
        self._rows = found.past_key_values
        logits: Tensor = found.logits[0]
        return logits.float()


@dataclass
class TextScores:
    """What was found of some windows.

    Args:
        num_windows: that were read.
        num_tokens: that were scored.
        loss: sum of -log P of them, nats.
        other_loss: of the reference.
        kl: of each token, nats; none without a reference.
        num_same: tokens of which both models find the same one most likely.
        num_common: of the `TOP` most likely tokens of both, those in common, over all tokens.
    """

    num_windows: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    other_loss: float = 0.0
    kl: list[Tensor] = field(default_factory=list)
    num_same: int = 0
    num_common: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data; what needs a reference only where there was one."""
        found: dict[str, Any] = {
            "windows": self.num_windows,
            "tokens": self.num_tokens,
            "perplexity": math.exp(self.loss / self.num_tokens),
        }
        if self.kl:
            kl = torch.cat(self.kl)
            found["against"] = {
                "perplexity": math.exp(self.other_loss / self.num_tokens),
                "perplexity_ratio": math.exp((self.loss - self.other_loss) / self.num_tokens),
                "kl_mean": float(kl.mean()),
                "kl_99": float(kl.quantile(0.99)),
                "different_tokens": self.num_tokens - self.num_same,
                f"top_{TOP}_overlap": self.num_common / (TOP * self.num_tokens),
            }
        return found


def windows_of(
    texts: Sequence[Sequence[int]], context: int, first: int | None
) -> Iterator[list[int]]:
    """Token ids of texts in windows of `context` tokens at most, and two at least.

    Args:
        texts: token ids of each.
        context: tokens of a window, 2 or more.
        first: token that each window begins with, or None.
    """
    begin = [] if first is None else [first]
    step = context - len(begin)
    for text in texts:
        for place in range(0, len(text), step):
            window = begin + list(text[place : place + step])
            if len(window) > 1:
                yield window


def score_texts(
    model: Scored, windows: Sequence[Sequence[int]], other: Scored | None, progress: Progress
) -> TextScores:
    """Score windows with a model, and compare it with another one.

    Args:
        model: what is looked at.
        windows: of token ids, two or more each.
        other: the reference, or None.
        progress: called after each window.
    Raises:
        ConfigError: models with other numbers of token ids.
        RequestError: no window.
    """
    if not windows:
        raise RequestError("no text of two tokens or more", "texts to score", "write some")
    if other is not None and other.vocab_size != model.vocab_size:
        raise ConfigError(
            f"models of {model.vocab_size} and of {other.vocab_size} token ids",
            "two models with the same tokens",
            "compare the engine with its own checkpoint, or with another engine of it",
        )
    scores = TextScores()
    for done, window in enumerate(windows, start=1):
        for start in range(0, len(window) - 1, _ROWS_AT_ONCE):
            own = window[start : min(start + _ROWS_AT_ONCE, len(window) - 1)]
            after = torch.tensor(window[start + 1 : start + 1 + len(own)])
            logits = [each.read(own, start) for each in (model, other) if each is not None]
            _add(scores, after, *(each.log_softmax(-1) for each in logits))
        scores.num_windows += 1
        progress(done, len(windows))
    return scores


def _add(scores: TextScores, after: Tensor, own: Tensor, other: Tensor | None = None) -> None:
    """Count rows of log probabilities [n, V], and the tokens [n] that come after each."""
    scores.num_tokens += len(after)
    scores.loss -= float(own.gather(1, after[:, None]).double().sum())
    if other is None:
        return
    scores.other_loss -= float(other.gather(1, after[:, None]).double().sum())
    # ids that the reference rules out add nothing
    parts = (other.exp() * (other - own)).masked_fill(other == -torch.inf, 0.0)
    scores.kl.append(parts.sum(1))
    scores.num_same += int((own.argmax(1) == other.argmax(1)).sum())
    best = [each.topk(min(TOP, each.shape[1]), dim=1).indices for each in (own, other)]
    scores.num_common += int((best[0][:, :, None] == best[1][:, None]).sum())
