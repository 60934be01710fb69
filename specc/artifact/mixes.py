"""Mixes of formats by the names that llama.cpp's users know: which weight is stored how.

Most projections have one format; those whose errors outputs feel most, values and the second
projection of an MLP in some of the layers, and the head, have one of more bits. Where rows are no
multiple of 256 columns, formats of 256 have one of 32 in their place.

Source: https://github.com/ggml-org/llama.cpp, src/llama-quant.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# in place of formats of 256 columns
_NARROW = {"q4_k": "q5_0", "q6_k": "q8_0"}
# names of projections in models of transformers: values, alone or with queries and keys, and what
# leads out of an MLP
_SENSITIVE = re.compile(r"\.(v_proj|down_proj|fc2|w2|dense_4h_to_h)\.weight$")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Mix:
    """A mix.

    Args:
        most: format of most projections.
        more: of sensitive ones in some layers.
        head: of the last projection, and of an embedding that is tied to it.
    """

    most: str
    more: str
    head: str

    def layout(self, name: str, columns: int, num_layers: int, is_head: bool) -> str:
        """The name of the layout of a weight [N, columns].

        Args:
            columns: K.
            is_head: it is the last projection's.
        """
        found = self.head if is_head else self.most
        layer = _LAYER.search(name) if _SENSITIVE.search(name) else None
        if not is_head and layer is not None and _has_more(int(layer[1]), num_layers):
            found = self.more
        if columns % 256:
            found = _NARROW.get(found, found)
        # what no block of 32 holds has one scale for each output
        return "int8" if columns % 32 else found


MIXES = {
    "q4_0": Mix("q4_0", "q4_0", "q6_k"),
    "q4_k_m": Mix("q4_k", "q6_k", "q6_k"),
    "q6_k": Mix("q6_k", "q6_k", "q6_k"),
    "q8_0": Mix("q8_0", "q8_0", "q8_0"),
}


def _has_more(layer: int, num_layers: int) -> bool:
    """The first and the last eighth of the layers, and every third one between them."""
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2
