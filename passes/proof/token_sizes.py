"""Where shapes have their dimension of tokens, for the proof that tokens stay apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from specc.artifact.graph_io import target_name
from specc.passes.program import Program, refusal


@dataclass(frozen=True)
class TokenSize:
    """The dimension of tokens of a shape.

    Args:
        dim: of the shape.
        scale: entries that each token has in it.
        is_rows: its tokens are those of `logit_rows`, else those of the pass.
    """

    dim: int
    scale: int
    is_rows: bool


class TokenSizes:
    """Finds the dimension of tokens in shapes of a program.

    Args:
        program: whose inputs `tokens` and `logit_rows` define the sizes.
    """

    def __init__(self, program: Program, phase: str) -> None:
        self._phase = phase
        # size of a dimension → scale and whether it is that of rows; None where it is neither
        self._scales: dict[Any, tuple[int, bool] | None] = {}
        self._units = [
            program.placeholder(name).meta["val"].shape[0].node.expr
            for name in ("tokens", "logit_rows")
        ]

    def of(self, node: fx.Node, value: Any) -> TokenSize | None:
        """The dimension of tokens of a value, which `node` makes; None where it has none.

        Raises:
            UnsupportedGraphError: there is a second one, or one of another size.
        """
        found: list[TokenSize] = []
        for dim, size in enumerate(value.shape):
            if isinstance(size, int):
                continue
            scale = self._scale(size)
            if scale is None:
                reason = (
                    f"{target_name(node.target)} makes a dimension of {size} entries where tokens"
                    f" are {self._units[0]}"
                )
                raise refusal(node, self._phase, reason)
            found.append(TokenSize(dim, *scale))
        if len(found) > 1:
            reason = f"{target_name(node.target)} relates tokens to tokens outside attention"
            raise refusal(node, self._phase, reason)
        return found[0] if found else None

    def _scale(self, size: Any) -> tuple[int, bool] | None:
        expression = size.node.expr
        if expression not in self._scales:
            found = None
            for unit, is_rows in zip(self._units, (False, True), strict=True):
                ratio = expression / unit
                if ratio.is_Integer:
                    found = (int(ratio), is_rows)
            self._scales[expression] = found
        return self._scales[expression]
