"""Self-drafts: the target itself, over a part of its cache, by some layers, with rounded weights.

Source of drafting with fewer layers: Draft & Verify, arXiv:2309.08168; early exit, where the last
layers are those left out, is LayerSkip, arXiv:2404.16710. Both train or search a choice of layers;
here the user names it. With quantized weights it is QuantSpec, arXiv:2502.10424, whose cache is
quantized, too; here it is the target's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.layers import KEPT, SKIPPED, Layers
from specc.drafters.views import View
from specc.errors import ConfigError

FACTS = DrafterFacts(
    kind="self",
    called="self-draft",
    passes=Passes.LEVELS,
    cache=Cache.TARGET,
    module="self",
    has_host=True,
)

# how a draft stores the weights of projections → name of that layout
WEIGHTS = {"int8": "int8", "int4": "int4-g64", "fp8": "fp8"}
# in the name of a draft: its weights, kept layers, or skipped ones, then what the name of a view
# has after self
_NAME = re.compile(
    r"self(?:_(int8|int4|fp8))?(?:_([lx])(\d+(?:to\d+)?(?:_\d+(?:to\d+)?)*))?((?:_[a-z]\d+)*)"
)


@dataclass(frozen=True)
class SelfDraft(Drafter):
    """A draft that is the target itself.

    Args:
        view: committed rows that it sees; None is all of them.
        layers: that it has; None is all of them.
        weights: of its projections, `int8`, `int4` or `fp8`; None are the target's.
    """

    facts = FACTS
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
        named = [(key, value) for key, _, value in parts if key in (KEPT, SKIPPED)]
        weights = ["".join(item) for item in parts if item[0] in WEIGHTS]
        others = ["".join(item) for item in parts if item[0] not in (KEPT, SKIPPED, *WEIGHTS)]
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
        match = _NAME.fullmatch(draft)
        if match is None:
            return None
        weights, letter, runs, rest = match.groups()
        view = View.named(f"self{rest}") if rest else None
        if (rest and view is None) or not (rest or runs or weights):
            return None
        if runs is None:
            return cls(view, None, weights)
        key = SKIPPED if letter == "x" else KEPT
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
    def has_second_program(self) -> bool:
        return self.layers is not None or self.weights is not None

    @property
    def quantization(self) -> str | None:
        """The layout of its projections' weights; None where they are the target's."""
        return WEIGHTS[self.weights] if self.weights else None

    def with_view(self, view: View) -> SelfDraft:
        return replace(self, view=view)

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """Only the root: the rows before it are the target's, and must stay them."""
        return 1

    def first_level(self, catch_up: int) -> int:
        return 1

    def typical_first_level(self) -> int:
        return 1

    @property
    def option(self) -> str:
        view = self.view.option.removeprefix("self:") if self.view else ""
        layers = self.layers.option if self.layers else ""
        return "self:" + ",".join(part for part in (self.weights, layers, view) if part)
