"""Columns that are in groups in another order than theirs: act-order, `desc_act`."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.errors import WeightError


def check_order(owners: Tensor, group: int, name: str, where: str) -> None:
    """Columns that are not in the order of their groups are not stored yet.

    Args:
        owners: [K] the group of each column.
        group: columns of a group.
        name: of the tensor.
        where: its checkpoint.
    Raises:
        WeightError: they are in another order (act-order, desc_act).
    """
    if torch.equal(owners.long(), torch.arange(len(owners)) // group):
        return
    raise WeightError(
        f"{name} in {where} puts columns in groups in another order than theirs (act-order,"
        " desc_act)",
        "groups of neighboring columns",
        "quantize the model without act-order (desc_act: false; actorder: null, weight or static),"
        " or pass the unquantized checkpoint with --quantize int8 or int4",
    )
