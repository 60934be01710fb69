"""Hidden states of a target that drafts read: where they are taken, by one name for each place.

Boundary b of a target of n layers is the residual stream that enters layer b: 0 is the embedding,
n is what the last layer puts out, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specc.errors import ConfigError

# what an id of a published list says: the stream that enters this layer, or that leaves it
ENTERING, AFTER = "entering", "after"
CONVENTIONS = (ENTERING, AFTER)


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


def boundaries_of(ids: Sequence[int], convention: str) -> tuple[int, ...]:
    """Ids of layers, as a checkpoint has them, as boundaries.

    | where | an id says | boundary |
    |---|---|---|
    | no list: 2, n // 2, n - 3 (SafeAILab/EAGLE, vllm-project/speculators) | entering | id |
    | `eagle_aux_hidden_state_layer_ids` | entering | id |
    | the same, if its first id is 1 (sgl-project/sglang, pull request 25454) | after | id + 1 |
    | `target_layer_ids` (z-lab/dflash, deepseek-ai/DeepSpec, transformers) | after | id + 1 |
    | `aux_hidden_state_layer_ids` of block drafters (vllm-project/speculators) | entering | id |
    | `dspark_target_layer_ids` | after | id + 1 |
    | the same, of `model_type` `deepseek_v41` | entering | id |

    After layer -1 is the embedding. Of the last boundary some mean what the final norm makes of it:
    hidden state n of transformers is that, the output of its last layer is not.

    Args:
        ids: in the order in which their hidden states lie side by side.
        convention: what they say, one of `CONVENTIONS`.
    Raises:
        ConfigError: a convention that is none, or an id before the embedding.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(
            f"ids of layers by {convention!r}", " or ".join(CONVENTIONS), "choose one of them"
        )
    shift = int(convention == AFTER)
    if any(number < -shift for number in ids):
        raise ConfigError(
            f"id {min(ids)} of a layer ({convention})",
            f"{-shift} or more",
            "check the draft's configuration",
        )
    return tuple(number + shift for number in ids)
