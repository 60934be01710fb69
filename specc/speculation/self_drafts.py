"""Self-drafts: the target itself, over a part of its cache, by some layers, with rounded weights.

Source of drafting with fewer layers: Draft & Verify, arXiv:2309.08168; early exit, where the last
layers are those left out, is LayerSkip, arXiv:2404.16710. Both train or search a choice of layers;
here the user names it. With quantized weights it is QuantSpec, arXiv:2502.10424, whose cache is
quantized, too; here it is the target's own.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

from specc.errors import ConfigError
from specc.speculation.views import View

_RANGES = re.compile(r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*")
_KEPT, _SKIPPED = "layers", "skip"
# how a draft stores the weights of projections → name of that layout
WEIGHTS = {"int8": "int8", "int4": "int4-g64", "fp8": "fp8"}
# in the name of a draft: its weights, kept layers, or skipped ones, then what the name of a view
# has after self
_NAME = re.compile(
    r"self(?:_(int8|int4|fp8))?(?:_([lx])(\d+(?:to\d+)?(?:_\d+(?:to\d+)?)*))?((?:_[a-z]\d+)*)"
)


@dataclass(frozen=True)
class Layers:
    """Some layers of a target, numbered from 0 in the order of execution.

    Args:
        numbers: ascending.
        are_skipped: a draft leaves these out; else it has these alone.
    """

    numbers: tuple[int, ...]
    are_skipped: bool = False

    @classmethod
    def parse(cls, key: str, text: str) -> Layers:
        """Layers as an option has them: `layers=0-3+6` or `skip=4-5`.

        Raises:
            ConfigError: no numbers and ranges, a range that goes down, or auto.
        """
        if (key, text) == (_SKIPPED, "auto"):
            raise ConfigError(
                "--draft self:skip=auto",
                "layers by number: which of them pay is measured on prompts, and a compilation has"
                " none",
                "compile without it, then run specc tune ENGINE --prompts FILE --skip auto, which"
                " says which --draft to compile with",
            )
        runs = [
            [int(number) for number in run.split("-")]
            for run in (text.split("+") if _RANGES.fullmatch(text) else ())
        ]
        if not runs or any(run[-1] < run[0] for run in runs):
            raise ConfigError(
                f"--draft self:{key}={text}",
                "numbers and ascending ranges of layers, joined by +; the first layer is 0",
                f"for example --draft self:{key}=0-3+6",
            )
        numbers = {number for run in runs for number in range(run[0], run[-1] + 1)}
        return cls(tuple(sorted(numbers)), key == _SKIPPED)

    @property
    def key(self) -> str:
        """Of the option."""
        return _SKIPPED if self.are_skipped else _KEPT

    @property
    def option(self) -> str:
        """What users call them: `layers=0-3+6`."""
        return f"{self.key}={'+'.join(_join(run, '-') for run in self._runs())}"

    @property
    def name(self) -> str:
        """Part of the name of a plan's draft: `l0to3_6`."""
        letter = "x" if self.are_skipped else "l"
        return letter + "_".join(_join(run, "to") for run in self._runs())

    def kept(self, num_layers: int) -> tuple[int, ...]:
        """Layers that a draft has, of so many.

        Raises:
            ConfigError: a layer that the target does not have, or no layer is left.
        """
        draft = f"--draft self:{self.option}, and a target of {num_layers} layers"
        if self.numbers[-1] >= num_layers:
            raise ConfigError(
                draft, f"layers among 0 … {num_layers - 1}", "choose some that the target has"
            )
        if not self.are_skipped:
            return self.numbers
        left = tuple(n for n in range(num_layers) if n not in self.numbers)
        if not left:
            raise ConfigError(draft, "one layer that is left, or more", "skip fewer layers")
        return left

    def _runs(self) -> list[list[int]]:
        """Numbers that follow each other, together."""
        runs = itertools.groupby(enumerate(self.numbers), key=lambda item: item[1] - item[0])
        return [[number for _, number in run] for _, run in runs]


@dataclass(frozen=True)
class SelfDraft:
    """A draft that is the target itself.

    Args:
        view: committed rows that it sees; None is all of them.
        layers: that it has; None is all of them.
        weights: of its projections, `int8`, `int4` or `fp8`; None are the target's.
    """

    view: View | None = None
    layers: Layers | None = None
    weights: str | None = None

    @classmethod
    def parse(cls, text: str) -> SelfDraft | None:
        """A self-draft as `--draft` has it, `self:int8,window=512`; None of what is none.

        Raises:
            ConfigError: it begins like one, and is malformed.
        """
        kind, _, rest = text.partition(":")
        if kind != "self":
            return None
        parts = [item.partition("=") for item in rest.split(",")]
        named = [(key, value) for key, _, value in parts if key in (_KEPT, _SKIPPED)]
        weights = ["".join(item) for item in parts if item[0] in WEIGHTS]
        others = ["".join(item) for item in parts if item[0] not in (_KEPT, _SKIPPED, *WEIGHTS)]
        if len(named) > 1:
            raise ConfigError(
                f"--draft {text}", "one of layers and skip, once", "leave one of them out"
            )
        if len(weights) > 1 or not set(weights) <= WEIGHTS.keys():
            raise ConfigError(
                f"--draft {text}",
                f"one of {', '.join(WEIGHTS)}, once and without a value",
                f"for example --draft self:{next(iter(WEIGHTS))}",
            )
        layers = Layers.parse(*named[0]) if named else None
        view = View.parse(f"self:{','.join(others)}") if others else None
        return cls(view, layers, weights[0] if weights else None)

    @classmethod
    def named(cls, draft: str) -> SelfDraft | None:
        """The self-draft of a plan's draft, `self_l0to5_w512_s4`; None of other drafts."""
        return _named(draft)

    @classmethod
    def _read_name(cls, draft: str) -> SelfDraft | None:
        match = _NAME.fullmatch(draft)
        if match is None:
            return None
        weights, letter, runs, rest = match.groups()
        view = View.named(f"self{rest}") if rest else None
        if (rest and view is None) or not (rest or runs or weights):
            return None
        if runs is None:
            return cls(view, None, weights)
        key = _SKIPPED if letter == "x" else _KEPT
        try:
            found = cls(view, Layers.parse(key, runs.replace("_", "+").replace("to", "-")), weights)
        except ConfigError:
            return None
        # one draft has one name
        return found if found.name == draft else None

    @property
    def name(self) -> str:
        """What plans call it."""
        weights = f"_{self.weights}" if self.weights else ""
        layers = f"_{self.layers.name}" if self.layers else ""
        view = self.view.name.removeprefix("self") if self.view else ""
        return f"self{weights}{layers}{view}"

    @property
    def has_program(self) -> bool:
        """Whether it runs a program of its own whatever the target is."""
        return self.layers is not None or self.weights is not None

    @property
    def quantization(self) -> str | None:
        """The layout of its projections' weights; None where they are the target's."""
        return WEIGHTS[self.weights] if self.weights else None

    @property
    def option(self) -> str:
        """What users call it."""
        view = self.view.option.removeprefix("self:") if self.view else ""
        layers = self.layers.option if self.layers else ""
        return "self:" + ",".join(part for part in (self.weights, layers, view) if part)


@functools.lru_cache(maxsize=1024)
def _named(draft: str) -> SelfDraft | None:
    """Costs of steps are asked for by name, many times in each decision."""
    return SelfDraft._read_name(draft)


def is_self_draft(draft: str) -> bool:
    """Whether a draft is the target itself."""
    return SelfDraft.named(draft) is not None


def _join(run: list[int], by: str) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}{by}{run[-1]}"
