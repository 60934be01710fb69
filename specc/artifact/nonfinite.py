"""Weights that are no numbers: NaN, infinity, and what overflows in the type of the engine.

A weight file is checked while it is written, chunk by chunk, which costs a small part of hashing
it. Only where a chunk holds such a value is its tensor read again, to count and to locate them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.safetensors_io import Buffer
from specc.errors import WeightError


@dataclass(frozen=True)
class NonFinite:
    """What one tensor of a checkpoint holds besides finite numbers.

    Args:
        num_nan: values that are NaN.
        num_infinite: values that are infinite.
        num_overflowing: finite values that the type of the engine cannot hold.
        first: index of the first of them.
    """

    name: str
    location: str
    num_nan: int
    num_infinite: int
    num_overflowing: int
    first: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return self.num_nan + self.num_infinite + self.num_overflowing

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        kinds = (
            (self.num_nan, "NaN"),
            (self.num_infinite, "infinite"),
            (self.num_overflowing, f"too large for {dtype}"),
        )
        told = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
        values = "value" if self.count == 1 else "values"
        return (
            f"{self.name} in {self.location} holds {self.count} {values} that are no finite"
            f" numbers ({told}), the first at {list(self.first)}"
        )


Report = Callable[[NonFinite], None]


def refuse(found: NonFinite) -> None:
    """Raises WeightError: always."""
    if found.count == found.num_overflowing:
        raise WeightError(
            str(found),
            "weights that the engine's type can hold",
            "pass --dtype bfloat16 or --dtype float32; --allow-nonfinite-weights compiles them as"
            " infinity",
        )
    raise WeightError(
        str(found),
        "finite weights",
        "download or save the checkpoint again; --allow-nonfinite-weights compiles it as it is",
    )


def refuse_integers(found: NonFinite) -> None:
    """Raises WeightError: always. No integers stand for what is not finite."""
    raise WeightError(
        str(found),
        "finite weights and scales: a weight that is rounded to integers has a finite scale",
        "download or save the checkpoint again, or leave out --quantize; --allow-nonfinite-weights"
        " is for weights in floating point alone",
    )


def is_finite(chunk: Buffer, dtype: torch.dtype) -> bool:
    """Whether all elements of a chunk are finite; of types that cannot hold others, always."""
    data = memoryview(chunk).cast("B")
    if not dtype.is_floating_point or not data.nbytes:
        return True
    # the smallest and the largest in one pass, without a temporary; NaN is passed on by both
    low, high = torch.aminmax(_tensor(data, dtype))
    return math.isfinite(low.item()) and math.isfinite(high.item())


def watch(
    chunks: Iterable[Buffer], dtype: torch.dtype, find: Callable[[], NonFinite], report: Report
) -> Iterator[Buffer]:
    """Pass chunks on; at the first one that is not finite, report what `find` says.

    Args:
        chunks: whole elements.
        find: reads the tensor again.
        report: called once at most; it may raise.
    """
    is_reported = False
    for chunk in chunks:
        if not is_reported and not is_finite(chunk, dtype):
            is_reported = True
            report(find())
        yield chunk


def find_nonfinite(
    chunks: Iterable[Buffer], source: torch.dtype, target: torch.dtype
) -> tuple[int, int, int, int]:
    """Count values of a stream: NaN, infinite, overflowing; and the place of the first of them.

    Args:
        chunks: whole elements of type `source`.
    """
    nan = infinite = overflowing = 0
    first, done = -1, 0
    for chunk in chunks:
        values = _tensor(memoryview(chunk).cast("B"), source)
        bad = ~values.to(target).isfinite()
        num_nan, num_infinite = int(values.isnan().sum()), int(values.isinf().sum())
        nan, infinite = nan + num_nan, infinite + num_infinite
        overflowing += int(bad.sum()) - num_nan - num_infinite
        if first < 0 and bool(bad.any()):
            first = done + int(bad.int().argmax())
        done += values.numel()
    return nan, infinite, overflowing, first


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    # frombuffer warns about memory that it could write to by mistake
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
