"""What a captured step costs on a GPU that nobody measured: a sum over the nodes of its graph.

A node waits for the one before it, starts, and streams its bytes; nothing overlaps. Every constant
says where it is from; what is assumed stays so until a GPU has been measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# kinds of nodes
PRODUCT, ATTEND, OTHER = "product", "attend", "other"


@dataclass(frozen=True)
class GraphCosts:
    """Constants of a device; the defaults are those of an H200.

    Args:
        bytes_per_s: of its memory.
        copy_share: of that which a copy reaches, read and written bytes counted.
        gap_s: from the end of a node to the start of the next, in a graph.
        ramp_s: kind → seconds of a node in which it does not stream: first loads, last stores.
        stream_share: kind → share of the copy bandwidth that a node reaches while it streams.
    """

    device: str = "H200"
    bytes_per_s: float = 4.8e12
    copy_share: float = 0.9
    gap_s: float = 1.3e-6
    ramp_s: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({PRODUCT: 1e-6, ATTEND: 2e-6, OTHER: 1e-6})
    )
    stream_share: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({PRODUCT: 0.92, ATTEND: 0.75, OTHER: 0.8})
    )

    @property
    def copy_bytes_per_s(self) -> float:
        """What floors are counted with."""
        return self.bytes_per_s * self.copy_share

    def floor_ms(self, num_bytes: float) -> float:
        """Milliseconds that a copy takes to move these bytes."""
        return 1e3 * num_bytes / self.copy_bytes_per_s

    def node_ms(self, kind: str, num_bytes: float) -> float:
        """Milliseconds of one node, the wait before it included."""
        stream = num_bytes / (self.copy_bytes_per_s * self.stream_share[kind])
        return 1e3 * (self.gap_s + self.ramp_s[kind] + stream)

    def assumptions(self) -> list[dict[str, object]]:
        """Every constant with its unit and where it is from, for a report."""
        assumed = "assumed; to be measured"
        rows: list[tuple[str, float, str, str]] = [
            (
                "memory bandwidth",
                self.bytes_per_s / 1e9,
                "GB/s",
                f"data sheet of the {self.device}",
            ),
            ("copy bandwidth over it", self.copy_share, "", assumed),
            (
                "gap between dependent nodes of a graph",
                self.gap_s * 1e6,
                "µs",
                "measured on an H100 with empty kernels: Spector et al., “Look Ma, No Bubbles!”,"
                " Hazy Research, 2025-05-27; no programmatic dependent launch",
            ),
            (
                "gap where both nodes are dependent launches, at least",
                0.0,
                "µs",
                "assumed, for `least` alone: no measurement of it was found. After a kernel that"
                " does not trigger, the whole gap: there PDL changed decode by less than the noise"
                " on an RTX 5090 (github.com/kekzl/imp, pull request 1740, 2026-08)",
            ),
        ]
        for kind in (PRODUCT, ATTEND, OTHER):
            rows.append((f"ramp of a node, {kind}", self.ramp_s[kind] * 1e6, "µs", assumed))
        for kind in (PRODUCT, ATTEND, OTHER):
            share = self.stream_share[kind]
            rows.append((f"copy bandwidth that a node reaches, {kind}", share, "", assumed))
        rows.append(
            (
                "share of products of few rows that run as fused kernels",
                1.0,
                "",
                "assumed; an engine measures which are faster when it loads",
            )
        )
        return [dict(zip(("name", "value", "unit", "source"), row, strict=True)) for row in rows]


H200 = GraphCosts()
