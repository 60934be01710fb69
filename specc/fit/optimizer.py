"""What every training here steps with: two optimizers, a schedule, and the type of products."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

# of parameters that have a row for each token
_OF_TOKENS = ("embed", "lm_head", "markov", "codebook")


class Optimizer:
    """Muon for the matrices of the layers, AdamW for embeddings, heads and norms."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        self.model = model
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            knows_tokens = any(part in name for part in _OF_TOKENS)
            (others if parameter.ndim != 2 or knows_tokens else matrices).append(parameter)
        self.parts = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.1),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peaks = (muon_lr, adam_lr)

    def step(self, scale: float) -> None:
        """Take one step at ``scale`` times the peak learning rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.param_groups[0]["lr"] = peak * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What a run that goes on needs."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take what `state_dict` said."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Schedule:
    """Warmup, a plateau, then a linear decay to zero, by steps or by minutes.

    Whichever runs out first ends the stage, so a machine that is slower than planned still
    finishes its decay within the time it was given.
    """

    def __init__(self, steps: int, minutes: float, warmup: int = 40, decay: float = 0.5) -> None:
        self.steps, self.seconds, self.warmup, self.decay = steps, minutes * 60, warmup, decay
        self.start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds that have gone by."""
        return time.monotonic() - self.start

    def begin_before(self, seconds: float) -> None:
        """Go on after so many seconds of an earlier run."""
        self.start = time.monotonic() - seconds

    def progress(self, step: int) -> float:
        return max(step / self.steps, self.elapsed() / self.seconds)

    def scale(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (1.0 - self.progress(step)) / self.decay)


def autocast(device: str = "cpu") -> torch.autocast:
    """Products in bfloat16, the rest in float32."""
    return torch.autocast(device, dtype=torch.bfloat16)
