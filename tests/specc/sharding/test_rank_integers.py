"""Integers of an engine's weights, read back from its blocks."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.packed_stream import packed_stream
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import round_weight
from specc.artifact.weights import MemoryReader
from specc.sharding.rank_integers import RankIntegers


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-zeros-fragments-64", "int8-fragments-128"])
def test_rows_of_a_weight_whose_outputs_lie_apart(name) -> None:
    """Rows that begin and end inside of what is stored together."""
    layout = QuantizedLayout.named(name)
    whole = round_weight(torch.randn(256, 256), layout)
    data = b"".join(map(bytes, packed_stream([whole], layout, 256)))
    stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    reader = MemoryReader({"w": stored.view(layout.stored_shape((256, 256)))})
    weight = RankIntegers.of("w", (256, 256), layout, [reader], None)
    for first, last in ((0, 256), (40, 100), (3, 5), (130, 256)):
        found, want = weight.integers(reader, first, last), whole.rows(first, last)
        for part in ("levels", "scales", "zeros"):
            one, other = getattr(found, part), getattr(want, part)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.float(), other.float())
