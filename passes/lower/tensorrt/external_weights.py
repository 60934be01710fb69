"""Weights that an ONNX file names in other files: there, and long enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specc.errors import WeightError

if TYPE_CHECKING:
    import onnx


def check_external_weights(model: onnx.ModelProto, directory: Path) -> None:
    """Refuse a file whose weights cannot be read; TensorRT would name one of them, and no reason.

    Args:
        model: without its external weights.
        directory: of the ONNX file.
    Raises:
        WeightError: a file is absent, too short, or outside of the directory.
    """
    ends: dict[str, int] = {}
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if location := place.get("location"):
            end = int(place.get("offset", 0)) + int(place.get("length", 0))
            ends[location] = max(end, ends.get(location, 0))
    for location, end in ends.items():
        path = directory / location
        if not path.resolve().is_relative_to(directory.resolve()):
            raise WeightError(
                f"weights in {location}", f"a file in {directory}", "compile the model again"
            )
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            raise WeightError(
                f"no file {path}" if size is None else f"{path} of {size} bytes",
                f"the weights of the ONNX file beside it, {end} bytes at least",
                "compile the model again, or copy the whole directory",
            )
