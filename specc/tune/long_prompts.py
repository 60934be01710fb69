"""Prompts of a given length, of the user's own: joined, and repeated where they are too few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LongPrompts(NamedTuple):
    """What tuning runs.

    Args:
        token_ids: of each.
        is_repeated: a prompt is in it more than once: easier to draft than other text is.
    """

    token_ids: list[list[int]]
    is_repeated: bool = False


def join_prompts(prompts: Sequence[list[int]], context: int) -> LongPrompts:
    """Prompts of `context` tokens each, as many as there are tokens for; one at least.

    They are joined in the order given, and no two of the results share one. Where all together
    are shorter, they are repeated.

    Args:
        prompts: token ids of each, one prompt of one token or more.
        context: tokens, 1 or more.
    """
    found: list[list[int]] = [[]]
    for prompt in prompts:
        if len(found[-1]) >= context:
            found.append([])
        found[-1] += prompt
    full = [ids[:context] for ids in found if len(ids) >= context]
    if full:
        return LongPrompts(full)
    (short,) = found
    return LongPrompts([(short * -(-context // len(short)))[:context]], is_repeated=True)
