"""Texts for training a head, with what their target computes along them.

A head reads the target's hidden states, and learns what the target finds likely next. Both are
computed once: a row of a text keeps the hidden states that the head reads and the last one, of
which a product with the target's head gives all probabilities again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

# rows of one pass of the target
_ROWS = 32


@dataclass(frozen=True)
class Texts:
    """Texts of one length.

    Args:
        tokens: [rows, length] int64.
        taps: [rows, length, A · H], hidden states that the head reads, side by side.
        last: [rows, length, H], hidden states after the target's final norm.
        context: tokens that the target has not written itself, at the beginning of each row.
    """

    tokens: Tensor
    taps: Tensor
    last: Tensor
    context: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]

    def rows(self, chosen: Tensor) -> Texts:
        """Some rows, [n] int64."""
        return Texts(self.tokens[chosen], self.taps[chosen], self.last[chosen], self.context)


@torch.no_grad()
def continue_texts(
    target: PreTrainedModel,
    prompts: Tensor,
    length: int,
    temperature: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Let the target go on with prompts.

    Args:
        target: in float32.
        prompts: [rows, context] int64.
        length: tokens to add, whatever they are.
        temperature: 0 is greedy.
        seen: [rows, context] 1, and 0 where a row has been filled up on the left.
    Returns:
        [rows, context + length] int64.
    """
    # top_k: else the library keeps the best 50
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts) if seen is None else seen,
        max_new_tokens=length,
        eos_token_id=None,
        **(sampling or {"do_sample": False}),
    )


@torch.no_grad()
def read_texts(
    target: PreTrainedModel,
    tokens: Tensor,
    boundaries: Sequence[int],
    context: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Texts:
    """What the target computes along texts.

    Args:
        target: in float32.
        tokens: [rows, length] int64.
        boundaries: of the hidden states to keep; b is what enters layer b.
        context: see `Texts`.
        dtype: of products, and of what is kept.
    """
    taps, last = [], []
    for part in tokens.split(_ROWS):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            states = target.model(part, use_cache=False, output_hidden_states=True).hidden_states
        taps.append(torch.cat([states[place] for place in boundaries], -1).to(dtype))
        # the library's last one has been normalized
        last.append(states[-1].to(dtype))
    return Texts(tokens, torch.cat(taps), torch.cat(last), context)


def save_texts(texts: Sequence[Texts], path: Path) -> None:
    """Keep texts in one file; the context of each is in its name."""
    tensors = {
        f"{number}.{text.context}.{key}": getattr(text, key).contiguous()
        for number, text in enumerate(texts)
        for key in ("tokens", "taps", "last")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def load_texts(path: Path) -> list[Texts]:
    """Read what `save_texts` wrote."""
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            number, context, key = name.split(".")
            parts.setdefault((int(number), int(context)), {})[key] = file.get_tensor(name)
    return [Texts(**part, context=context) for (_, context), part in sorted(parts.items())]
