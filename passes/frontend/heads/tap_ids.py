"""Where a head reads its target: ids of layers, as files write them, as boundaries.

Boundary b is the residual stream that enters layer b: 0 is the embedding, n of n layers what the
last layer returns. Published files name the same places in two ways:

| where | an id means | boundary |
|---|---|---|
| no ids: 2, n // 2, n - 3 (SafeAILab/EAGLE, vllm-project/speculators) | entering | id |
| `eagle_aux_hidden_state_layer_ids` | entering | id |
| the same with 1 as its first id (sgl-project/sglang pull request 25454) | after | id + 1 |
| `target_layer_ids` of deepseek-ai/DeepSpec; -1 is the embedding | after | id + 1 |

Taken off by one, a head still drafts: it is accepted less often, and nothing else tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from specc.errors import HeadError

# what an id of a layer means: the stream before it, or after it
ENTERING, AFTER = "entering", "after"
CONVENTIONS = (ENTERING, AFTER)
# the first id of lists that count what layers return
_FIRST_OF_AFTER = 1


def convention_of(ids: Sequence[int]) -> str:
    """What ids of `eagle_aux_hidden_state_layer_ids` mean: see the table."""
    return AFTER if ids and ids[0] == _FIRST_OF_AFTER else ENTERING


def default_ids(num_layers: int) -> tuple[int, int, int]:
    """Ids of heads whose files name none, in the convention `ENTERING`."""
    return 2, num_layers // 2, num_layers - 3


def boundaries_of(
    ids: Sequence[int], convention: str, num_layers: int, name: str
) -> tuple[int, ...]:
    """Boundaries that ids of layers name, in their order.

    Args:
        ids: as the file has them.
        convention: one of `CONVENTIONS`.
        num_layers: of the target.
        name: of the head, for errors.
    Raises:
        HeadError: an id of no layer of this target.
    """
    shift = 1 if convention == AFTER else 0
    for tap in ids:
        if not 0 <= tap + shift <= num_layers:
            raise HeadError(
                f"{name}: it reads layer {tap} ({convention}) of a target of {num_layers} layers",
                f"layers {-shift} to {num_layers - shift}",
                "pass the head of this target, or the target of this head",
            )
    return tuple(tap + shift for tap in ids)
