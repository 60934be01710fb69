"""Columns that are in groups in another order than theirs: act-order, `desc_act`.

An engine has such a weight with its columns group after group, and its rows x in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.errors import WeightError


def column_order(owners: Tensor, group: int, name: str, where: str) -> Tensor | None:
    """Columns in the order of their groups, and within a group in theirs.

    Args:
        owners: [K] the group of each column.
        group: columns of a group; the last group may have fewer.
    Returns:
        [K] int64; None where columns are in this order already.
    Raises:
        WeightError: groups of other sizes, or columns of none.
    """
    owners = owners.long()
    sorted_owners, order = torch.sort(owners, stable=True)
    if not torch.equal(sorted_owners, torch.arange(len(owners)) // group):
        raise WeightError(
            f"{name} in {where} has groups that are not of {group} columns each",
            f"{group} columns in every group but the last",
            "download or save the checkpoint again, or pass the unquantized checkpoint with"
            " --quantize int8 or int4",
        )
    return None if torch.equal(sorted_owners, owners) else order
