"""What configurations of block drafters say of parts beside DFlash's layers.

DSpark's confidence head is there where `enable_confidence_head` says so. Where it says nothing, it
is in files of speculators, and in those of SpecForge if `confidence_head_alpha` is above 0; whether
it reads the token before, `confidence_head_with_markov`, is true and false there.

A *convolution* of DFlash 2 goes around attention and MLP of each layer (`block_head.py`), and its
*selector* adds to logits what the token before says of the best tokens (`block_bias.py`). Sources:
z-lab/dflash; vllm-project/speculators models/dflash2; sgl-project/sglang srt/models/dflash.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specc.drafters.block import MARKOV_KINDS, VANILLA, BlockDraft
from specc.errors import HeadError
from specc.passes.drafters.head_config import read_number
from specc.passes.drafters.head_spec import SPECFORGE, SPECULATORS

_DO = "correct config.json, or download the drafter again"
_OTHER_DRAFT = "pass another draft"

CONV_KEYS = ("conv_kernel_size", "conv_group_size")
SELECTOR_KEYS = ("selector_rank", "selector_top_k")
SCALE_KEYS = ("output_multiplier", "final_logit_softcapping")
# rows that a convolution adds up, at most: of no block it is more
_MOST_TAPS = 64

Shapes = dict[str, tuple[int, ...]]
# rows of the drafter's head and of the target's embedding → shapes of tensors, by name
ShapesOf = Callable[[int, int], Shapes]


@dataclass(frozen=True)
class Conv:
    """Convolutions along rows of a block, before and after attention and MLP of each layer.

    Args:
        taps: T, rows that are added up: a row's own, and those before it.
        size: channels that share a factor, which each row computes.
    """

    taps: int
    size: int

    def describe(self) -> str:
        """For people."""
        return (
            f"convolutions over {self.taps} rows of a block, {self.size} channels with one factor"
        )

    def shapes(self, num_layers: int, width: int) -> Shapes:
        """Of its tensors, by name."""
        found: Shapes = {}
        for layer in range(num_layers):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{part}"
                found[f"{name}.base_kernel"] = (2, self.taps, width)
                columns = 2 * self.taps * width // self.size
                found[f"{name}.kernel_projection.weight"] = (columns, width)
        return found


@dataclass(frozen=True)
class ScoreFiles:
    """What files of one kind say of a score whose weights steps read, beside what DFlash's say.

    Args:
        read: keys of its configuration, what its pass fills, layers of transformers, and the
            drafter's name → the drafter, and shapes of the score's tensors.
        keys: that `dflash_config` may have.
        projector: that `projector_type` is, or DFlash's.
        may_convolve: its layers may have convolutions.
    """

    read: Callable[[Mapping[str, Any], BlockDraft, Any, str], tuple[BlockDraft, ShapesOf]]
    keys: tuple[str, ...] = ()
    projector: str = ""
    may_convolve: bool = False


@dataclass(frozen=True)
class LogitScale:
    """What becomes of logits before anything is added: cap · tanh(factor · logit / cap).

    Args:
        factor: above 0.
        cap: above 0, or 0 for none.
    """

    factor: float = 1.0
    cap: float = 0.0


def read_conv(values: Mapping[str, Any], width: int, name: str) -> Conv | None:
    """None of a drafter without convolutions.

    Args:
        values: keys of its configuration.
        width: d.
        name: of the drafter, for errors.
    Raises:
        HeadError: sizes that no convolution has.
    """
    if all(values.get(key) is None for key in CONV_KEYS):
        return None
    taps, size = required(values, CONV_KEYS, name)
    if taps > _MOST_TAPS or width % size:
        raise HeadError(
            f"{name}: config.json: convolutions of {taps} rows, groups of {size} of {width}"
            " channels",
            f"{_MOST_TAPS} rows or fewer, and groups that divide {width}",
            _DO,
        )
    return Conv(taps, size)


def read_selector(values: Mapping[str, Any], vocab_size: int | None, name: str) -> tuple[int, int]:
    """Rank r of its tables, and K: how many tokens it chooses among.

    Args:
        vocab_size: V where it is said, or None.
    """
    rank, candidates = required(values, SELECTOR_KEYS, name)
    if vocab_size is not None and candidates > vocab_size:
        raise HeadError(
            f"{name}: config.json: selector_top_k is {candidates}",
            f"{vocab_size} or less: as many as there are ids",
            _DO,
        )
    return rank, candidates


def read_scale(values: Mapping[str, Any], name: str) -> LogitScale:
    found = {}
    for key, plain in zip(SCALE_KEYS, (1.0, 0.0), strict=True):
        value = values.get(key)
        value = plain if value is None else value
        is_number = type(value) in (int, float) and value < float("inf")
        if not is_number or not (value > 0 or value == plain):
            raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "above 0", _DO)
        found[key] = float(value)
    return LogitScale(*found.values())


def required(values: Mapping[str, Any], keys: tuple[str, ...], name: str) -> list[int]:
    """Numbers from 1 on, none of which a drafter's configuration may leave out."""
    found = [read_number(values, key, name) for key in keys]
    for key, value in zip(keys, found, strict=True):
        if value is None:
            raise HeadError(f"{name}: config.json: no {key}", "a number from 1 on", _DO)
    return [value for value in found if value is not None]


def read_markov(values: Mapping[str, Any], name: str) -> tuple[int, str]:
    """Rank of the product that is added to logits for tokens before, 0 is none; and its kind."""
    if values.get("markov_rank") in (None, 0):
        return 0, VANILLA
    kind = values.get("markov_head_type", VANILLA)
    # trainers read it in small letters
    kind = kind.lower() if isinstance(kind, str) else kind
    if kind not in MARKOV_KINDS:
        raise HeadError(
            f"{name}: config.json: markov_head_type is {kind!r:.40}",
            " or ".join(MARKOV_KINDS),
            _OTHER_DRAFT,
        )
    return read_number(values, "markov_rank", name) or 0, kind


def read_confidence(values: Mapping[str, Any], layout: str, name: str) -> bool | None:
    """Whether its confidence head reads the token before; None where it has none."""
    is_there = read_flag(values, ("enable_confidence_head",), name)
    if is_there is None and layout == SPECFORGE:
        is_there = bool(values.get("confidence_head_alpha"))
    if not (layout == SPECULATORS if is_there is None else is_there):
        return None
    reads_token = read_flag(values, ("confidence_head_with_markov",), name)
    return layout == SPECULATORS if reads_token is None else reads_token


def read_flag(values: Mapping[str, Any], keys: tuple[str, ...], name: str) -> bool | None:
    """The first of these keys that is there."""
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "true or false", _DO)
        return value
    return None
