"""Low-rank terms of adapters beside a product (`specc.kernels.reference.lora`)."""

from __future__ import annotations

from torch import Tensor

from specc.kernels.operator import NoRule, OfRows, Operand, Operator, PassLimits
from specc.kernels.reference import lora

_FLOAT_BYTES = 4


def _add_lora_fake(
    base: Tensor,
    input: Tensor,
    adapters: Tensor,
    down: Tensor,
    up: Tensor,
    pieces: Tensor,
    scales: Tensor,
) -> Tensor:
    return base.new_empty(base.shape)


def _add_lora_scratch(limits: PassLimits, base: Operand, down: Operand, **_: object) -> int:
    """A · x of every token, of its own adapter's rows."""
    return _FLOAT_BYTES * int(base.shape[0]) * int(down.shape[0])


ADD_LORA = Operator(
    "add_lora(Tensor base, Tensor input, Tensor adapters, Tensor down, Tensor up, Tensor pieces,"
    " Tensor scales) -> Tensor",
    reference=lora.add_lora_reference,
    fake=_add_lora_fake,
    tokens=OfRows(
        rows=("base", "input", "adapters"), parameters=("down", "up", "pieces", "scales")
    ),
    cut=NoRule("engines with adapters have one rank"),
    scratch=_add_lora_scratch,
    cpu=True,
)
