"""Experts that every token takes, in the launches of those that it chooses.

They lie beside the stacks: rows of all their gates, rows that these multiply, and of the second
product columns of all. An expert of them has as many as one of a stack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specc.kernels.cuda.experts_operands import NAME
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check


@dataclass(frozen=True)
class Shared:
    """How many there are, after how many others."""

    count: int
    routed: int

    @classmethod
    def checked(
        cls, x: Tensor, routed: int, size: int, gate_up: Tensor | None, down: Tensor | None
    ) -> Shared:
        """Those of a call: `gate_up` [2 S I, H] and `down` [H, S I], or none.

        Args:
            x: [N, H].
            size: I.

        Raises:
            ValueError: they do not fit the others, or one of both is not there.
        """
        if gate_up is None and down is None:
            return cls(0, routed)
        columns = 0 if down is None or down.dim() != 2 else down.shape[1]
        hidden = x.shape[1]
        for name, weight, shape in (
            ("gate_up", gate_up, [2 * columns, hidden]),
            ("down", down, [hidden, columns]),
        ):
            fits = weight is not None and list(weight.shape) == shape and weight.dtype == x.dtype
            check(
                fits and columns > 0 and columns % size == 0 and weight.is_contiguous(),  # type: ignore[union-attr]
                NAME,
                f"shared_{name} {None if weight is None else (weight.dtype, list(weight.shape))}",
                f"contiguous [2 S · {size}, {hidden}] and [{hidden}, S · {size}] of {x.dtype}",
            )
        return cls(columns // size, routed)

    def argument(self, weight: Tensor | None) -> dict[str, Any]:
        """What a kernel is given of them."""
        return {} if weight is None else {"shared": weight, "routed": self.routed}


def with_shared(item: Shipped) -> Shipped:
    """A configuration, of a product beside such experts."""
    own = {"shared": item.signature["levels"], "routed": "i32"}
    return replace(
        item,
        name=f"{item.name}-shared",
        signature={**item.signature, **own},
        constexprs={key: x for key, x in item.constexprs.items() if key not in own},
        divisible=(*item.divisible, "shared"),
    )
