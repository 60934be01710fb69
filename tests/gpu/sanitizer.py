"""Where there is no compute-sanitizer."""

from __future__ import annotations

from tests.gpu.results import Device, Results, Skipped


def skip(results: Results, device: Device) -> None:
    """Raises Skipped."""
    raise Skipped("no compute-sanitizer on the path or in CUDA's folders")
