"""Where a head reads its target: ids of layers, as files write them, as boundaries.

Boundary b is the residual stream that enters layer b: 0 is the embedding, n of n layers what the
last layer returns. Published files name the same places in two ways:

| where | an id means | boundary |
|---|---|---|
| no ids: 2, n // 2, n - 3 (SafeAILab/EAGLE, vllm-project/speculators) | entering | id |
| `eagle_aux_hidden_state_layer_ids` | entering | id |
| the same with 1 as its first id (sgl-project/sglang pull request 25454) | after | id + 1 |
| `target_layer_ids` of deepseek-ai/DeepSpec; -1 is the embedding | after | id + 1 |
| `target_layer_ids` of z-lab/dflash | after | id + 1 |
| `aux_hidden_state_layer_ids` of block drafters of vllm-project/speculators | entering | id |

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


def choose_taps(
    ids: Sequence[int],
    convention: str,
    num_taps: int,
    num_layers: int,
    is_last_normed: bool | None,
    name: str,
    num_named: int | None = None,
) -> tuple[tuple[int, ...], bool]:
    """Boundaries, and whether the last is taken after the final norm.

    Args:
        ids: of layers.
        convention: one of `CONVENTIONS`.
        num_taps: A, which the projection of a draft reads.
        num_layers: of the target.
        is_last_normed: what is known of a tap after the last layer; None is nothing.
        name: of the draft, for errors.
        num_named: ids that its file has; None is all.
    Raises:
        HeadError: other taps than ids, an id of no layer, or a tap of which nothing is known.
    """
    if len(ids) != num_taps:
        count = len(ids) if num_named is None else num_named
        raise HeadError(
            f"{name}: fc reads {num_taps} hidden states; config.json names {count or 'no'} layers",
            f"{num_taps} ids of layers",
            "pass the config.json of this checkpoint",
        )
    boundaries = boundaries_of(ids, convention, num_layers, name)
    reads_last = num_layers in boundaries
    if reads_last and is_last_normed is None:
        raise HeadError(
            f"{name}: it reads what the last layer returns; nothing says whether that is before"
            " or after the final norm",
            f"layers before {num_layers - 1}, or the word of whoever trained it",
            "pass --draft-assume is_last_normed=true, or false, or a head that reads other layers",
        )
    return boundaries, reads_last and bool(is_last_normed)


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
