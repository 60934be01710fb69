"""Hidden states of a target that drafts read: where they are taken, by one name for each place.

Boundary b of a target of n layers is the residual stream that enters layer b: 0 is the embedding,
n is what the last layer puts out, before the final norm. Hidden state n of transformers is after
it. What published ids of layers mean: `specc.passes.drafters.tap_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError


@dataclass(frozen=True)
class Taps:
    """What the target keeps of every token, side by side in this order.

    Args:
        boundaries: one or more.
        is_last_normed: boundary n is taken after the final norm.
    """

    boundaries: tuple[int, ...]
    is_last_normed: bool = False

    def check(self, num_layers: int) -> None:
        """Raises ConfigError: no boundary, or one that a target of so many layers does not have."""
        outside = [b for b in self.boundaries if not 0 <= b <= num_layers]
        if not self.boundaries or outside:
            raise ConfigError(
                f"taps at {f'boundary {outside[0]}' if outside else 'no boundary'} of a target of"
                f" {num_layers} layers",
                f"boundaries 0 … {num_layers}",
                "choose a draft that was trained for this target",
            )
