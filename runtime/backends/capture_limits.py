"""What capturing graphs may cost while an engine loads."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError


@dataclass(frozen=True)
class CaptureLimits:
    """What capturing graphs while an engine loads may cost; the rest is captured at first use.

    Args:
        max_seconds: of capturing. A step runs once before its capture, and what that takes to
            compile kernels is not counted: it would be needed without graphs, too. Below 0
            nothing is captured while the engine loads.
        max_bytes: of the device's memory; weights, caches and the memory of a pass come first.
        sizes: batch sizes to capture, ascending; None is powers of two up to the largest batch.
    Raises:
        ConfigError: no sizes, or sizes that do not ascend from 1 on.
    """

    max_seconds: float = 30.0
    max_bytes: int = 4 << 30
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes is not None and (not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1):
            raise ConfigError(
                f"capture sizes {list(sizes)}",
                "batch sizes that ascend, each at least 1",
                "for example 1, 2, 4, 8",
            )

    @classmethod
    def lazy(cls) -> CaptureLimits:
        """Nothing while the engine loads: for a few steps of few batch sizes."""
        return cls(max_seconds=-1.0)

    def buckets(self, max_batch: int) -> tuple[int, ...]:
        """Batch sizes that get graphs; the last one is `max_batch`."""
        if self.sizes is None:
            powers = (1 << i for i in range(max_batch.bit_length()))
            return tuple(dict.fromkeys([*(size for size in powers if size < max_batch), max_batch]))
        return (*(size for size in self.sizes if size < max_batch), max_batch)
