"""Whether a request's text repeats itself: most drafts then do better than before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# tokens that have to be there twice, among so many of the newest
_LENGTH, _NEWEST = 8, 1024


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether the last tokens were there before; a few microseconds, however long the text is.

    Args:
        token_ids: of a request so far.
    """
    newest = array("q", token_ids[-_NEWEST:])
    # what is found last, at the end itself, says nothing
    return newest.tobytes().find(newest[-_LENGTH:].tobytes()) < 8 * (len(newest) - _LENGTH)
